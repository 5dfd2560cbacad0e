"""SpecEE's configuration (arXiv 2504.08850), and decoding settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from multirate.lab.depth_baselines._shared.exits import ExitsConfig, ThresholdConfig
from multirate.methods._shared.shape import BaseShape


@dataclass(frozen=True)
class SpecEEConfig(ExitsConfig):
    """A proposer, and a predictor at each exit; also see ExitsConfig. Decoding decides which exits
    are checked.
    """

    METHOD: ClassVar[str] = "specee"
    FROM_BASE: ClassVar[dict[str, str]] = {
        "exits": "every layer from L/4 on (the paper: every layer)"
    }

    rank: int = 512
    """Width of the proposer's MLP."""
    width: int = 512
    """Width of a predictor."""

    def check(self) -> None:
        super().check()
        self.require_count("rank", "width")

    def check_base(self, base: BaseShape) -> None:
        super().check_base(base)
        self.require(self.draft_vocab is None or self.draft_vocab >= 4, "draft_vocab", "at least 4")

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        """An exit after every layer from a quarter of the base's on (the paper: every layer)."""
        return {"exits": list(range(max(1, base.num_layers // 4), base.num_layers))}


@dataclass(frozen=True)
class SpecEEDecodeConfig(ThresholdConfig):
    METHOD: ClassVar[str] = "specee"

    threshold: float | None = 0.5
    """Minimum predicted probability with which the full head checks whether a token leaves, from 0
    to 1. Null: no token leaves.
    """
