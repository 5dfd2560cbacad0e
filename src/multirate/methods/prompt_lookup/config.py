"""Settings of prompt lookup."""

from __future__ import annotations

from dataclasses import dataclass

from multirate.methods.common.config import MethodConfig
from multirate.model.rows import MAX_TREE_BIT


@dataclass(frozen=True)
class PromptLookupConfig(MethodConfig):
    """max_ngram: longest n-gram looked up (shorter ones are tried next). tokens: length of a
    draft. staged: as of `sam`. [ours]
    """

    max_ngram: int = 3
    tokens: int = 10
    staged: int = 11

    def check(self) -> None:
        for name in ("max_ngram", "tokens"):
            self.require(getattr(self, name) >= 1, name, "a whole number of at least 1")
        self.require(0 <= self.staged <= MAX_TREE_BIT, "staged", f"0 to {MAX_TREE_BIT}")
