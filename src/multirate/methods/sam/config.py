"""Settings of SAM-Decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from multirate.methods._shared.config import MethodConfig


@dataclass(frozen=True)
class SAMConfig(MethodConfig):
    """Decoding settings."""

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
