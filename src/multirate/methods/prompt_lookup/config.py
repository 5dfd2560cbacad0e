"""Settings of prompt lookup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multirate.methods.common.staged_config import StagedTextConfig

MOST_TOKENS = 4096
"""Of a draft; each has a row of the head's outputs in memory."""


@dataclass(frozen=True)
class PromptLookupConfig(StagedTextConfig):
    """max_ngram: longest n-gram looked up (shorter ones are tried next). tokens: length of a draft.
    staged_ahead: all of a pass, as drafts of one length, however short the match, are dear behind
    it. The others: StagedTextConfig.
    """

    METHOD: ClassVar[str] = "prompt_lookup"

    max_ngram: int = 3
    tokens: int = 10
    staged_ahead: int = 11
    direct_match: int = 3

    def check(self) -> None:
        super().check()
        self.require_count("max_ngram")
        self.require(
            1 <= self.tokens <= MOST_TOKENS, "tokens", f"a whole number from 1 to {MOST_TOKENS}"
        )
