"""Settings of SAM-Decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from multirate.methods.common.staged_config import StagedTextConfig


@dataclass(frozen=True)
class SAMConfig(StagedTextConfig):
    """tokens: longest draft. least: shortest match that is drafted from. per_match: tokens drafted
    for each matched one. texts: a file of other texts (`multirate texts`) in which the end of the
    text is looked up, too; a model's name: those that the package has of it. per_match_ahead:
    `per_match` of drafts that the narrow copy verifies, where a row costs more. [ours] The others:
    StagedTextConfig.
    """

    METHOD: ClassVar[str] = "sam"

    tokens: int = 10
    least: int = 1
    per_match: float = 4.0
    per_match_ahead: float = 1.0
    texts: str | None = None

    def check(self) -> None:
        super().check()
        self.require_count("tokens", "least")
        for name in ("per_match", "per_match_ahead"):
            self.require(getattr(self, name) > 0, name, "a number above 0")

    def length(self, matched: int, in_stages: bool = False) -> int:
        """How many tokens are drafted after a match of so many."""
        if matched < self.least:
            return 0
        each = self.per_match_ahead if in_stages else self.per_match
        return min(self.tokens, max(1, int(each * matched)))

    @property
    def longest(self) -> int:
        """The longest match whose length makes a difference."""
        least = min(self.per_match, self.per_match_ahead)
        return max(self.least, math.ceil(self.tokens / least))
