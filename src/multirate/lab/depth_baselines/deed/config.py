"""DEED's configuration (arXiv 2311.08623), and decoding settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from multirate.lab.depth_baselines._shared.exits import (
    ExitsConfig,
    ThresholdConfig,
    spaced_exits,
)
from multirate.methods._shared.shape import BaseShape


@dataclass(frozen=True)
class DeedConfig(ExitsConfig):
    """An adapter before the base's head at each exit; also see ExitsConfig."""

    METHOD: ClassVar[str] = "deed"
    FROM_BASE: ClassVar[dict[str, str]] = {"exits": "six, from L/4 on (the paper: every layer)"}

    rank: int = 128
    """Width of an adapter."""

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        """Six exits from a quarter of the base's layers on, as in lite (the paper: every layer)."""
        return {"exits": spaced_exits(base.num_layers, 6, 1 / 4)}


@dataclass(frozen=True)
class DeedDecodeConfig(ThresholdConfig):
    """Decoding settings; probabilities are those of the likeliest token."""

    METHOD: ClassVar[str] = "deed"
