"""Registers DEED."""

from __future__ import annotations

from multirate.decoding.dynamic_depth import DynamicDepthStep
from multirate.lab.depth_baselines._shared.multi_exit import MultiExits
from multirate.lab.depth_baselines.deed.config import DeedConfig, DeedDecodeConfig
from multirate.lab.depth_baselines.deed.modules import AdaptedExits
from multirate.lab.depth_baselines.deed.train import DeedObjective
from multirate.methods.spec import PROBABILITIES, DynamicMode, MethodSpec, Training, register

SPEC = register(
    MethodSpec(
        name="deed",
        title="DEED (arXiv 2311.08623; reconstructed beside a frozen base)",
        summary=(
            "skips a token's remaining layers at the first adapted exit that is confident "
            "enough (lossy)"
        ),
        settings=DeedDecodeConfig,
        step=lambda decoder, module, settings: DynamicDepthStep(
            MultiExits.of(decoder, module, [settings.threshold] * len(module.exits)), "deferred"
        ),
        dynamic=DynamicMode(
            gates=lambda exits: exits.exits,
            settings=lambda exits, threshold: {"threshold": threshold},
            path=PROBABILITIES,
        ),
        training=Training(DeedConfig, AdaptedExits, DeedObjective),
        role="depth",
        lossless=False,
    )
)
