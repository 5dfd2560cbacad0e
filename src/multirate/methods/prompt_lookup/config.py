"""Settings of prompt lookup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multirate.methods.common.staged_config import StagedTextConfig


@dataclass(frozen=True)
class PromptLookupConfig(StagedTextConfig):
    """max_ngram: longest n-gram looked up (shorter ones are tried next). tokens: length of a draft.
    The others: StagedTextConfig.
    """

    METHOD: ClassVar[str] = "prompt_lookup"

    max_ngram: int = 3
    tokens: int = 10
    direct_match: int = 3

    def check(self) -> None:
        super().check()
        for name in ("max_ngram", "tokens"):
            self.require(getattr(self, name) >= 1, name, "a whole number of at least 1")
