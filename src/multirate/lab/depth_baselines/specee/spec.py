"""Registers SpecEE."""

from __future__ import annotations

from multirate.decoding.dynamic_depth import DynamicDepthStep
from multirate.lab.depth_baselines._shared.exits import register_exits
from multirate.lab.depth_baselines.specee.config import SpecEEConfig, SpecEEDecodeConfig
from multirate.lab.depth_baselines.specee.exits import SpecEEExits
from multirate.lab.depth_baselines.specee.modules import SpecEE
from multirate.lab.depth_baselines.specee.train import SpecEEObjective, start_from_least_squares
from multirate.methods.spec import Training

SPEC = register_exits(
    name="specee",
    title="SpecEE (arXiv 2504.08850; reconstructed with a proposer of its own)",
    summary="skips a token's remaining layers once it is one of four tokens proposed before the "
    "pass (lossy)",
    settings=SpecEEDecodeConfig,
    step=lambda decoder, module, settings: DynamicDepthStep(
        SpecEEExits(decoder, module, settings), "propagate"
    ),
    training=Training(SpecEEConfig, SpecEE, SpecEEObjective, start=start_from_least_squares),
)
