"""Registers FREE."""

from __future__ import annotations

from multirate.decoding.dynamic_depth import DynamicDepthStep
from multirate.lab.depth_baselines._shared.linear_exits import LinearExits, start_from_least_squares
from multirate.lab.depth_baselines._shared.multi_exit import MultiExits
from multirate.lab.depth_baselines.free.config import FreeConfig, FreeDecodeConfig
from multirate.lab.depth_baselines.free.train import FreeObjective
from multirate.methods.spec import PROBABILITIES, DynamicMode, MethodSpec, Training, register

SPEC = register(
    MethodSpec(
        name="free",
        title="FREE (arXiv 2310.05424; reconstructed beside a frozen base)",
        summary=(
            "skips a token's remaining layers at one shallow exit that is confident enough (lossy)"
        ),
        settings=FreeDecodeConfig,
        step=lambda decoder, module, settings: DynamicDepthStep(
            MultiExits.of(decoder, module, [settings.threshold]), "deferred"
        ),
        dynamic=DynamicMode(
            gates=lambda exits: exits.exits,
            settings=lambda exits, threshold: {"threshold": threshold},
            path=PROBABILITIES,
        ),
        training=Training(FreeConfig, LinearExits, FreeObjective, start=start_from_least_squares),
        role="depth",
        lossless=False,
    )
)
