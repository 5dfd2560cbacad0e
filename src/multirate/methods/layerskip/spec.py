"""Registers early-exit self-speculation."""

from __future__ import annotations

from multirate.methods.layerskip.decode import LayerSkipConfig, LayerSkipDrafter
from multirate.methods.spec import MethodSpec, register

SPEC = register(
    MethodSpec(
        name="layerskip",
        title="early exit (LayerSkip-style, no training)",
        summary="drafts with the first layers and the shared head, and verifies with the others",
        settings=LayerSkipConfig,
        tunable={"tokens": (3, 6, 9), "confidence": (0.4, 0.6, 0.8)},
        drafter=lambda decoder, module, settings: LayerSkipDrafter(decoder, settings),
    )
)
