"""LITE's configuration (arXiv 2310.18581), and decoding settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from multirate.lab.depth_baselines._shared.exits import ExitsConfig, spaced_exits
from multirate.methods._shared.config import MethodConfig
from multirate.methods._shared.shape import BaseShape

PAPER_THRESHOLDS = (0.95, 0.95, 0.9, 0.9, 0.8, 0.7)
"""The paper's thresholds for a 7B model's exits after 8, 12, 16, 20, 24 and 28 of 32 layers."""


def default_thresholds(count: int) -> tuple[float, ...]:
    """The paper's thresholds, interpolated linearly to another number of exits."""
    places = np.linspace(0, len(PAPER_THRESHOLDS) - 1, count)
    values = np.interp(places, range(len(PAPER_THRESHOLDS)), PAPER_THRESHOLDS)
    return tuple(round(float(value), 4) for value in values)


@dataclass(frozen=True)
class LiteConfig(ExitsConfig):
    """One linear map before the base's head at each exit; also see ExitsConfig."""

    METHOD: ClassVar[str] = "lite"

    thresholds: tuple[float, ...] = ()
    """For each exit the minimum top-1 probability with which a token leaves."""

    def check(self) -> None:
        super().check()
        self.require(
            len(self.thresholds) == len(self.exits)
            and all(0 <= threshold <= 1 for threshold in self.thresholds),
            "thresholds",
            "a number from 0 to 1 for each exit",
        )

    @classmethod
    def for_base(cls, base: BaseShape, **options: Any) -> Self:
        """Six exits from a quarter of the base's layers on, an eighth apart, as in the paper."""
        exits = options.setdefault("exits", spaced_exits(base.num_layers, 6, 1 / 4))
        count = len(exits) if isinstance(exits, (list, tuple)) else 1
        return super().for_base(base, **{"thresholds": default_thresholds(count)} | options)


@dataclass(frozen=True)
class LiteDecodeConfig(MethodConfig):
    """Decoding settings."""

    METHOD: ClassVar[str] = "lite"

    thresholds: tuple[float | None, ...] | None = None
    """One for each exit; null for an exit means never. Null instead of the list: the accelerator's.
    """
