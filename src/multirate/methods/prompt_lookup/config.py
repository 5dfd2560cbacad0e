"""Settings of prompt lookup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multirate.methods._shared.config import MethodConfig

MOST_TOKENS = 4096
"""Upper limit of `tokens`; each drafted token needs a row of the head's outputs in memory."""


@dataclass(frozen=True)
class PromptLookupConfig(MethodConfig):
    """Decoding settings."""

    METHOD: ClassVar[str] = "prompt_lookup"

    max_ngram: int = 3
    """Longest n-gram to look up; shorter ones are tried next."""
    tokens: int = 10
    """Length of a draft."""

    def check(self) -> None:
        super().check()
        self.require_count("max_ngram")
        self.require(
            1 <= self.tokens <= MOST_TOKENS, "tokens", f"a whole number from 1 to {MOST_TOKENS}"
        )
