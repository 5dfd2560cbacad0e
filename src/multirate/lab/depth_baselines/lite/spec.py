"""LITE (arXiv 2310.18581): configuration and registration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from multirate.decoding.dynamic_depth import DynamicDepthStep
from multirate.lab.depth_baselines._shared.exits import (
    ExitsConfig,
    register_exits,
    spaced_exits,
)
from multirate.lab.depth_baselines._shared.linear_exits import LinearExits, start_from_least_squares
from multirate.lab.depth_baselines._shared.multi_exit import MultiExitObjective, MultiExits
from multirate.methods._shared.config import MethodConfig
from multirate.methods._shared.shape import BaseShape
from multirate.methods.spec import PROBABILITIES, DynamicMode, Training
from multirate.runtime.decoder import Decoder

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
    FROM_BASE: ClassVar[dict[str, str]] = {
        "exits": "six, from L/4 on (the paper: 8, 12, …, 28 of 32)"
    }

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        """Six exits from a quarter of the base's layers on, an eighth apart, as in the paper."""
        return {"exits": spaced_exits(base.num_layers, 6, 1 / 4)}


@dataclass(frozen=True)
class LiteDecodeConfig(MethodConfig):
    METHOD: ClassVar[str] = "lite"

    thresholds: tuple[float | None, ...] | None = None
    """For each exit the minimum top-1 probability with which a token leaves; null for an exit
    means never. Null instead of the list: the paper's, interpolated.
    """


def _step(decoder: Decoder, exits: LinearExits, settings: LiteDecodeConfig) -> DynamicDepthStep:
    thresholds = settings.thresholds
    if thresholds is None:
        thresholds = default_thresholds(len(exits.exits))
    return DynamicDepthStep(MultiExits(decoder, exits, thresholds), "propagate")


def _settings(exits: LinearExits, threshold: float | None) -> dict[str, Any]:
    return {"thresholds": [threshold] * len(exits.exits)}


SPEC = register_exits(
    name="lite",
    title="LITE (arXiv 2310.18581; reconstructed beside a frozen base)",
    summary="skips a token's remaining layers at the first trained exit that is confident enough "
    "(lossy)",
    settings=LiteDecodeConfig,
    step=_step,
    dynamic=DynamicMode(lambda exits: exits.exits, _settings, PROBABILITIES),
    training=Training(LiteConfig, LinearExits, MultiExitObjective, start=start_from_least_squares),
)
