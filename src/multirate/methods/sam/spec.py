"""SAM-Decoding: drafts by a suffix automaton of prompt and output [Hu et al. 2024]. No model, no
training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from multirate.methods._shared.config import MethodConfig
from multirate.methods._shared.lookup import Lookup
from multirate.methods._shared.text_drafter import TextDrafter
from multirate.methods.spec import MethodSpec, register
from multirate.runtime.decoder import Decoder


@dataclass(frozen=True)
class SAMConfig(MethodConfig):
    """The longest end of the text that occurred before, however long, proposes what followed; its
    length decides whether and how much.
    """

    METHOD: ClassVar[str] = "sam"

    tokens: int = 10
    """Maximum length of a draft."""
    per_match: float = 4.0
    """Tokens drafted per matched token."""
    texts: str | None = None
    """A file of other texts (`multirate texts`) to search as well, or a model's name for the texts
    that the package has for it. Null: none.
    """

    def check(self) -> None:
        super().check()
        self.require_count("tokens")
        self.require(self.per_match > 0, "per_match", "a number above 0")

    def length(self, matched: int) -> int:
        """How many tokens to draft after a match of `matched` tokens."""
        if not matched:
            return 0
        return min(self.tokens, max(1, int(self.per_match * matched)))

    @property
    def longest(self) -> int:
        """The longest match to tell apart from shorter ones, by how much is drafted and how much of
        it was accepted.
        """
        return max(self.tokens, math.ceil(self.tokens / self.per_match))


def _drafter(decoder: Decoder, _: Any, settings: SAMConfig) -> TextDrafter:
    lookup = Lookup.of(settings.texts, decoder)
    if lookup.given is None:
        lookup = replace(lookup, longest=settings.longest)  # no more need be told
    return TextDrafter(decoder, lookup, settings.tokens, settings.length)


SPEC = register(
    MethodSpec(
        name="sam",
        plain_name="text lookup",
        title="SAM-Decoding (arXiv 2411.10666, no training)",
        summary="drafts what followed the longest suffix of the text that occurred before",
        settings=SAMConfig,
        tunable={"tokens": (7, 10, 16), "per_match": (2.0, 4.0)},
        drafter=_drafter,
        yardstick=True,
        recommended=True,
    )
)
