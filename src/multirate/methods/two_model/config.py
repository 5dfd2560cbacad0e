"""Settings of two-model speculation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multirate.methods._shared.joined_drafter import JoinedConfig


@dataclass(frozen=True)
class TwoModelConfig(JoinedConfig):
    """Decoding settings; also see JoinedConfig."""

    METHOD: ClassVar[str] = "two_model"

    draft: str | None = None
    """The draft model: a name, folder, GGUF file or hub id. Required."""
    tokens: int = 4
    """Maximum number of drafted tokens."""

    def check(self) -> None:
        super().check()
        self.require_count("tokens")
