"""LITE's configuration (arXiv 2310.18581), and decoding settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from multirate.methods.common.config import ExitWeights, MethodConfig
from multirate.methods.common.exits import ExitsConfig, spaced_exits
from multirate.methods.common.shape import BaseShape

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

    @staticmethod
    def for_base(base: BaseShape, **options: Any) -> LiteConfig:
        """Six exits from a quarter of the base's layers on, an eighth apart, as in the paper."""
        values: dict[str, Any] = {"exits": spaced_exits(base.num_layers, 6, 1 / 4)} | options
        exits = values["exits"]
        count = len(exits) if isinstance(exits, (list, tuple)) else 1
        config = LiteConfig.from_json({"thresholds": default_thresholds(count)} | values)
        config.check_base(base)
        return config


@dataclass(frozen=True)
class LiteDecodeConfig(MethodConfig):
    """Decoding settings."""

    METHOD: ClassVar[str] = "lite"

    thresholds: tuple[float | None, ...] | None = None
    """One for each exit; null for an exit means never. Null instead of the list: the accelerator's.
    """
    kv: Literal["propagate", "deferred"] = "propagate"
    """What later tokens read for the layers that a token skipped. propagate: computed from the
    residual it left with. deferred: exact, computed with the next token that goes as deep.
    """
    weights: ExitWeights = "int8"
    """How the native kernel packs a reduced head: int8 or bf16. [ours]"""
