"""Prompt lookup: what followed an earlier occurrence of the last n tokens, in prompt or output, is
the draft [Saxena 2023]. No model, no training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multirate.methods._shared.config import MethodConfig
from multirate.methods._shared.lookup import Lookup
from multirate.methods._shared.text_drafter import TextDrafter
from multirate.methods.spec import MethodSpec, register

MOST_TOKENS = 4096
"""Upper limit of `tokens`; each drafted token needs a row of the head's outputs in memory."""


@dataclass(frozen=True)
class PromptLookupConfig(MethodConfig):
    """The longest n-gram (n ≤ max_ngram) that occurred before proposes what followed its latest
    occurrence.
    """

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


SPEC = register(
    MethodSpec(
        name="prompt_lookup",
        title="prompt lookup (no training)",
        summary="drafts what followed the last few tokens earlier in the text",
        settings=PromptLookupConfig,
        tunable={"tokens": (4, 7, 10, 16), "max_ngram": (2, 3, 5)},
        drafter=lambda decoder, module, settings: TextDrafter(
            decoder, Lookup(settings.max_ngram), settings.tokens
        ),
    )
)
