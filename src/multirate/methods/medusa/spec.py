"""Registers Medusa."""

from __future__ import annotations

from multirate.methods.medusa.config import MedusaConfig, MedusaDecodeConfig
from multirate.methods.medusa.decode import MedusaDrafter
from multirate.methods.medusa.modules import MedusaHeads
from multirate.methods.medusa.train import MedusaObjective
from multirate.methods.spec import MethodSpec, Training, register

SPEC = register(
    MethodSpec(
        name="medusa",
        title="Medusa-1 (arXiv 2401.10774)",
        summary="drafts with trained heads on the last layer, one for each token ahead",
        settings=MedusaDecodeConfig,
        drafter=lambda decoder, module, settings: settings.joined(
            MedusaDrafter(decoder, module, settings), decoder
        ),
        training=Training(MedusaConfig, MedusaHeads, MedusaObjective),
        tunable={"widths": (None, (2,), (2, 1), (4, 2))},
    )
)
