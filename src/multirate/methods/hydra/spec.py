"""Registers Hydra."""

from __future__ import annotations

from multirate.methods.hydra.config import HydraConfig, HydraDecodeConfig
from multirate.methods.hydra.decode import HydraDrafter
from multirate.methods.hydra.modules import HydraHeads
from multirate.methods.hydra.train import HydraObjective, start_from_least_squares
from multirate.methods.spec import MethodSpec, Training, register

SPEC = register(
    MethodSpec(
        name="hydra",
        title="Hydra++ (arXiv 2402.05109)",
        summary="drafts with trained heads that read the tokens drafted before theirs",
        settings=HydraDecodeConfig,
        drafter=lambda decoder, module, settings: settings.joined(
            HydraDrafter(decoder, module, settings), decoder
        ),
        training=Training(HydraConfig, HydraHeads, HydraObjective, start=start_from_least_squares),
        tunable={"nodes": (7, 11, 16), "width": (1, 2), "draft_threshold": (0.15, 0.3)},
    )
)
