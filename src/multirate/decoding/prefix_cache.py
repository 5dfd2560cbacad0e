"""Keys and values kept between two calls, so that a conversation's next turn reads only what is
new.

K/V of steps that skip layers are cut off (Session.exact_length). What is kept equals what a prefill
of the same tokens writes, so no turn depends on how the one before was decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from multirate.runtime.kv_cache import KVCache

MIN_SHARED = 8
"""With fewer common tokens the prompt is read from the start, because a chat template's first
tokens begin every conversation.
"""


def in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    count = min(len(one), len(other))
    return next((n for n in range(count) if one[n] != other[n]), count)


@dataclass
class PrefixCache:
    """What one generation of one sequence left: `tokens` are the ones whose K/V are committed in
    `cache`.

    A session takes the cache out (`take`) and puts one back when it has finished, so an interrupted
    generation leaves nothing. The K/V belong to the weights that wrote them; code that changes the
    weights must drop the cache.
    """

    tokens: list[int] = field(default_factory=list)
    cache: KVCache | None = None

    def shared(self, prompt: Sequence[int]) -> int:
        """How many first tokens of `prompt` are in the cache. The last token never counts, because
        it has to run.
        """
        if self.cache is None:
            return 0
        same = min(in_common(self.tokens, prompt), len(prompt) - 1)
        return same if same >= MIN_SHARED else 0

    def take(self) -> KVCache | None:
        """Takes the cache out; this object has none until `keep`."""
        cache, self.cache = self.cache, None
        return cache

    def keep(self, tokens: list[int], cache: KVCache) -> None:
        """Stores a finished generation. `tokens` are all of its sequence; the cache may lack the
        last ones.
        """
        self.tokens, self.cache = tokens[: cache.lengths[0]], cache

    def nbytes(self) -> int:
        """Bytes of the kept K/V."""
        return 0 if self.cache is None else self.cache.nbytes()
