"""Settings of SAM-Decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass

from multirate.methods.common.config import MethodConfig
from multirate.model.rows import MAX_TREE_BIT


@dataclass(frozen=True)
class SAMConfig(MethodConfig):
    """tokens: longest draft. least: shortest match that is drafted from. per_match: tokens drafted
    for each matched one. texts: a file of other texts (`multirate texts`) in which the end of the
    text is looked up, too; a model's name: those that the package has of it. staged: as of trained
    streams: so many tokens that a narrow copy has verified are verified at once; 0: none. [ours]
    """

    tokens: int = 10
    least: int = 1
    per_match: float = 4.0
    texts: str | None = None
    staged: int = 11

    def check(self) -> None:
        self.require_count("tokens", "least")
        self.require(0 <= self.staged <= MAX_TREE_BIT, "staged", f"0 to {MAX_TREE_BIT}")
        self.require(self.per_match > 0, "per_match", "a number above 0")

    def length(self, matched: int) -> int:
        """How many tokens are drafted after a match of so many."""
        if matched < self.least:
            return 0
        return min(self.tokens, max(1, int(self.per_match * matched)))

    @property
    def longest(self) -> int:
        """The longest match whose length makes a difference."""
        return max(self.least, math.ceil(self.tokens / self.per_match))
