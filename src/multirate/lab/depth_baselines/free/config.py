"""FREE's configuration (arXiv 2310.05424), and decoding settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from multirate.lab.depth_baselines._shared.exits import ExitsConfig
from multirate.methods._shared.config import MethodConfig
from multirate.methods._shared.shape import BaseShape


@dataclass(frozen=True)
class FreeConfig(ExitsConfig):
    """One linear map before the base's head, at one shallow exit; `exits` is a list of one layer.
    Also see ExitsConfig.
    """

    METHOD: ClassVar[str] = "free"

    def check(self) -> None:
        super().check()
        self.require(len(self.exits) == 1, "exits", "a list of one layer count")

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        """The exit after a third of the base's layers, the deepest of the paper's (8 of 24)."""
        return {"exits": [max(1, round(base.num_layers / 3))]}


@dataclass(frozen=True)
class FreeDecodeConfig(MethodConfig):
    """Decoding settings."""

    METHOD: ClassVar[str] = "free"

    threshold: float | None = 0.9
    """Minimum top-1 probability with which a token leaves, from 0 to 1. Null: no token leaves."""

    def check(self) -> None:
        super().check()
        self.require_share("threshold")
