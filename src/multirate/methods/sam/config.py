"""Settings of SAM-Decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from multirate.methods.common.staged_config import StagedTextConfig


@dataclass(frozen=True)
class SAMConfig(StagedTextConfig):
    """Decoding settings; also see StagedTextConfig."""

    METHOD: ClassVar[str] = "sam"

    tokens: int = 10
    """Maximum length of a draft."""
    least: int = 1
    """Minimum match length to draft from."""
    per_match: float = 4.0
    """Tokens drafted per matched token."""
    per_match_ahead: float = 1.0
    """The same for drafts that the quantised copy verifies, where a row costs more. [ours]"""
    texts: str | None = None
    """A file of other texts (`multirate texts`) to search as well, or a model's name for the texts
    that the package has for it. Null: none.
    """

    def check(self) -> None:
        super().check()
        self.require_count("tokens", "least")
        for name in ("per_match", "per_match_ahead"):
            self.require(getattr(self, name) > 0, name, "a number above 0")

    def length(self, matched: int, in_stages: bool = False) -> int:
        """How many tokens to draft after a match of `matched` tokens."""
        if matched < self.least:
            return 0
        each = self.per_match_ahead if in_stages else self.per_match
        return min(self.tokens, max(1, int(each * matched)))

    @property
    def longest(self) -> int:
        """The longest match whose length makes a difference."""
        least = min(self.per_match, self.per_match_ahead)
        return max(self.least, math.ceil(self.tokens / least))
