"""DEED's objective and registration."""

from __future__ import annotations

from multirate.decoding.dynamic_depth import DynamicDepthStep
from multirate.lab.depth_baselines._shared.exits import register_exits
from multirate.lab.depth_baselines._shared.multi_exit import MultiExitObjective, MultiExits
from multirate.lab.depth_baselines.deed.modules import AdaptedExits, DeedConfig, DeedDecodeConfig
from multirate.methods._shared.objective import Term
from multirate.methods.spec import Training


class DeedObjective(MultiExitObjective):
    """Every exit towards the full model's distribution, weighed by its depth (the paper:
    cross-entropy with the text at every layer, the base tuned with it).
    """

    @property
    def terms(self) -> list[Term]:
        return [Term(exit, 1, float(exit)) for exit in self.module.exits]


SPEC = register_exits(
    name="deed",
    title="DEED (arXiv 2311.08623; reconstructed beside a frozen base)",
    summary="skips a token's remaining layers at the first adapted exit that is confident "
    "enough (lossy)",
    settings=DeedDecodeConfig,
    step=lambda decoder, module, settings: DynamicDepthStep(
        MultiExits(decoder, module, settings.threshold), "deferred"
    ),
    training=Training(DeedConfig, AdaptedExits, DeedObjective),
)
