"""Settings of two-model speculation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multirate.methods.common.joined_drafter import JoinedConfig


@dataclass(frozen=True)
class TwoModelConfig(JoinedConfig):
    """draft: the model that drafts, as models are named everywhere. tokens: of a draft, at most.
    confidence: a draft ends with the first token whose probability is lower (the token itself is
    still verified); 0: never. The others: JoinedConfig.
    """

    METHOD: ClassVar[str] = "two_model"

    draft: str | None = None
    tokens: int = 4
    confidence: float = 0.0

    def check(self) -> None:
        super().check()
        self.require_count("tokens")
        self.require(0 <= self.confidence <= 1, "confidence", "0 to 1")
