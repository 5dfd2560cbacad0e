"""Registers Mixture-of-Depths."""

from __future__ import annotations

from multirate.lab.depth_baselines._shared.exits import register_exits
from multirate.lab.depth_baselines.mixture_of_depths.config import (
    MixtureOfDepthsConfig,
    MixtureOfDepthsDecodeConfig,
)
from multirate.lab.depth_baselines.mixture_of_depths.decode import MixtureOfDepthsStep
from multirate.lab.depth_baselines.mixture_of_depths.modules import Routers
from multirate.lab.depth_baselines.mixture_of_depths.train import (
    RouterObjective,
    start_from_updates,
)
from multirate.methods.spec import PROBABILITIES, DynamicMode, Training

SPEC = register_exits(
    name="mixture_of_depths",
    title="Mixture-of-Depths (arXiv 2404.02258; routers added to a frozen base)",
    summary="skips each block for the tokens that its router leaves out (lossy)",
    settings=MixtureOfDepthsDecodeConfig,
    step=MixtureOfDepthsStep,
    dynamic=DynamicMode(
        gates=lambda routers: routers.config.blocks,
        settings=lambda routers, threshold: {"threshold": threshold},
        path=PROBABILITIES,
    ),
    training=Training(MixtureOfDepthsConfig, Routers, RouterObjective, start=start_from_updates),
)
