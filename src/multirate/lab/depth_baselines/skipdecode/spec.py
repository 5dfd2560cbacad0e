"""Registers SkipDecode."""

from __future__ import annotations

from typing import Any

from multirate.decoding.dynamic_depth import DynamicDepthStep
from multirate.lab.depth_baselines.skipdecode.config import SkipDecodeConfig
from multirate.lab.depth_baselines.skipdecode.schedule import PositionSchedule
from multirate.methods.spec import DynamicMode, MethodSpec, register


def _settings(_: Any, least: float | None) -> dict[str, Any]:
    return {"min_share": 1.0 if least is None else least}


SPEC = register(
    MethodSpec(
        name="skipdecode",
        title="SkipDecode (arXiv 2307.02628, no training)",
        summary=(
            "runs fewer layers the longer the text gets, the same for all rows of a batch (lossy)"
        ),
        settings=SkipDecodeConfig,
        step=lambda decoder, module, settings: DynamicDepthStep(
            PositionSchedule(decoder.info.num_layers, settings), "none"
        ),
        dynamic=DynamicMode(
            gates=lambda module: (),
            settings=_settings,
            path=(0.97, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5),
        ),
        role="depth",
        lossless=False,
    )
)
