"""Registers M2R2's two presets: "m2r2" (the paper's) and "m2r2-carry" (with our additions)."""

from __future__ import annotations

from functools import partial
from typing import Any

from multirate.methods._shared.branch_config import TUNABLE
from multirate.methods.m2r2.config import M2R2Config
from multirate.methods.m2r2.decode import M2R2Drafter
from multirate.methods.m2r2.decode_config import CarryDecodeConfig, M2R2DecodeConfig
from multirate.methods.m2r2.exits import step_of
from multirate.methods.m2r2.modules import AcceleratedStream
from multirate.methods.m2r2.tracing import M2R2Tracer
from multirate.methods.m2r2.train import M2R2Objective, start_from_least_squares, start_taps
from multirate.methods.spec import PROBABILITIES, DynamicMode, MethodSpec, Training, register


def _training(preset: str) -> Training:
    configure = partial(M2R2Config.for_base, preset=preset)
    return Training(
        M2R2Config,
        AcceleratedStream,
        M2R2Objective,
        configure=configure,
        start=start_from_least_squares,
        added={"features": start_taps},
    )


def _exit_settings(stream: AcceleratedStream, threshold: float | None) -> dict[str, Any]:
    return {"exit_thresholds": [threshold] * len(stream.config.gates)}


DYNAMIC = DynamicMode(
    gates=lambda stream: stream.config.gates,
    settings=_exit_settings,
    path=PROBABILITIES,
)
PAPER = register(
    MethodSpec(
        name="m2r2",
        title="M2R2 as the paper describes it (arXiv 2502.02040; reconstructed)",
        summary=(
            "drafts with an accelerated residual stream, and verifies with the remaining "
            "layers (the paper)"
        ),
        settings=M2R2DecodeConfig,
        tunable=TUNABLE,
        drafter=M2R2Drafter,
        step=step_of,
        dynamic=DYNAMIC,
        tracer=M2R2Tracer,
        training=_training("m2r2"),
    )
)
CARRY = register(
    MethodSpec(
        name="m2r2-carry",
        plain_name="M2R2",
        title="M2R2 with a carried residual and a block at the gate (ours)",
        summary="m2r2 with a carried final residual and a block at a shallow gate (ours)",
        settings=CarryDecodeConfig,
        tunable=TUNABLE,
        drafter=M2R2Drafter,
        step=step_of,
        dynamic=DYNAMIC,
        tracer=M2R2Tracer,
        training=_training("m2r2-carry"),
        recommended=True,
    )
)
