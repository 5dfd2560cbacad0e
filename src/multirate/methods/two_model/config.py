"""Settings of two-model speculation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multirate.methods.common.joined_drafter import JoinedConfig


@dataclass(frozen=True)
class TwoModelConfig(JoinedConfig):
    """Decoding settings; also see JoinedConfig."""

    METHOD: ClassVar[str] = "two_model"

    draft: str | None = None
    """The draft model: a name, folder, GGUF file or hub id. Required."""
    tokens: int = 4
    """Maximum number of drafted tokens."""
    confidence: float = 0.0
    """A draft ends with the first token whose probability is below this; that token is still
    verified. 0: never.
    """

    def check(self) -> None:
        super().check()
        self.require_count("tokens")
        self.require(0 <= self.confidence <= 1, "confidence", "0 to 1")
