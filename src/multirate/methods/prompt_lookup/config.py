"""Settings of prompt lookup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multirate.methods.common.staged_config import StagedConfig


@dataclass(frozen=True)
class PromptLookupConfig(StagedConfig):
    """max_ngram: longest n-gram looked up (shorter ones are tried next). tokens: length of a draft.
    The others: StagedConfig.
    """

    METHOD: ClassVar[str] = "prompt_lookup"

    max_ngram: int = 3
    tokens: int = 10

    def check(self) -> None:
        super().check()
        for name in ("max_ngram", "tokens"):
            self.require(getattr(self, name) >= 1, name, "a whole number of at least 1")
