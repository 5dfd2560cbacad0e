"""Keys and values kept between two calls, so that a conversation's next turn reads only what is
new.

What a step left that skips layers is cut off (Session.kept_length): kept are K/V that a prefill of
the same tokens writes, by what reads the step's prompts, so that no turn depends on how the one
before was decoded. A narrow copy's are kept, too, for the lossy method that reads it: reading an
answer again would take a fifth as long as decoding it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from multirate.model.kv_cache import KVCache

MIN_SHARED = 8
"""Fewer tokens in common are read again: a chat template's first tokens begin every conversation.
"""


@dataclass
class PrefixCache:
    """What one generation of one sequence left: `tokens` are those whose K/V are committed in
    `cache`.

    A session takes the cache out (`take`) and puts one back when it has finished, so that a
    generation which was interrupted leaves nothing. The K/V are those of the same weights: whoever
    changes these must drop it.
    """

    tokens: list[int] = field(default_factory=list)
    cache: KVCache | None = None
    exact: int = 0
    """How many of the first tokens' K/V are a prefill's."""

    def shared(self, prompt: Sequence[int]) -> int:
        """How many first tokens of `prompt` are in the cache; its last token never counts, it has
        to be run.
        """
        if self.cache is None:
            return 0
        count = min(len(self.tokens), len(prompt) - 1)
        same = next((i for i in range(count) if self.tokens[i] != prompt[i]), count)
        return same if same >= MIN_SHARED else 0

    def take(self) -> KVCache | None:
        """The cache; this object has none until `keep`."""
        cache, self.cache = self.cache, None
        return cache

    def keep(self, tokens: list[int], cache: KVCache, exact: int) -> None:
        """The generation has finished: `tokens` are all of its sequence, the cache may lack the
        last ones.
        """
        self.tokens, self.cache, self.exact = tokens[: cache.lengths[0]], cache, exact

    def nbytes(self) -> int:
        """Bytes of the kept K/V."""
        return 0 if self.cache is None else self.cache.nbytes()
