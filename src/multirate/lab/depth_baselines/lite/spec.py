"""Registers LITE."""

from __future__ import annotations

from typing import Any

from multirate.decoding.dynamic_depth import DynamicDepthStep
from multirate.lab.depth_baselines._shared.exits import register_exits
from multirate.lab.depth_baselines._shared.linear_exits import LinearExits, start_from_least_squares
from multirate.lab.depth_baselines._shared.multi_exit import MultiExitObjective, MultiExits
from multirate.lab.depth_baselines.lite.config import LiteConfig, LiteDecodeConfig
from multirate.methods.spec import PROBABILITIES, DynamicMode, Training
from multirate.runtime.decoder import Decoder


def _step(decoder: Decoder, exits: LinearExits, settings: LiteDecodeConfig) -> DynamicDepthStep:
    thresholds = settings.thresholds
    if thresholds is None:
        assert isinstance(exits.config, LiteConfig)
        thresholds = exits.config.thresholds
    return DynamicDepthStep(MultiExits.of(decoder, exits, thresholds), "propagate")


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
