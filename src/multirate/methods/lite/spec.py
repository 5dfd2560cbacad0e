"""Registers LITE."""

from __future__ import annotations

from typing import Any

from multirate.decoding.dynamic_depth import DynamicDepthStep
from multirate.methods.common.linear_exits import start_from_least_squares
from multirate.methods.lite.config import LiteConfig, LiteDecodeConfig
from multirate.methods.lite.exits import policy_of
from multirate.methods.lite.modules import LiteExits
from multirate.methods.lite.train import LiteObjective
from multirate.methods.spec import PROBABILITIES, DynamicMode, MethodSpec, Training, register


def _settings(exits: LiteExits, threshold: float | None) -> dict[str, Any]:
    return {"thresholds": [threshold] * len(exits.exits)}


SPEC = register(
    MethodSpec(
        name="lite",
        title="LITE (arXiv 2310.18581; reconstructed beside a frozen base)",
        summary=(
            "skips a token's remaining layers at the first trained exit that is confident "
            "enough (lossy)"
        ),
        settings=LiteDecodeConfig,
        step=lambda decoder, module, settings: DynamicDepthStep(
            policy_of(decoder, module, settings), settings.kv
        ),
        dynamic=DynamicMode(
            gates=lambda exits: exits.exits,
            settings=_settings,
            path=PROBABILITIES,
        ),
        training=Training(LiteConfig, LiteExits, LiteObjective, start=start_from_least_squares),
        role="depth",
        lossless=False,
    )
)
