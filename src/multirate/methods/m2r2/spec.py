"""Registers M2R2's two presets: "m2r2" (the paper's) and "m2r2-carry" (with our additions)."""

from __future__ import annotations

from functools import partial
from typing import Any

from multirate.methods.common.stream_config import TUNABLE
from multirate.methods.m2r2.config import M2R2Config
from multirate.methods.m2r2.decode import M2R2Drafter
from multirate.methods.m2r2.decode_config import CarryDecodeConfig, M2R2DecodeConfig
from multirate.methods.m2r2.exits import step_of
from multirate.methods.m2r2.modules import AcceleratedStream
from multirate.methods.m2r2.native_runner import NativeStreamRunner
from multirate.methods.m2r2.tracing import M2R2Tracer
from multirate.methods.m2r2.train import (
    M2R2Objective,
    start_from_least_squares,
    start_head,
    start_taps,
)
from multirate.methods.spec import PROBABILITIES, DynamicMode, MethodSpec, Training, register
from multirate.model.decoder import Decoder
from multirate.model.native.decoder import narrow_weights


def _training(preset: str) -> Training:
    configure = partial(M2R2Config.for_base, preset=preset)
    return Training(
        M2R2Config,
        AcceleratedStream,
        M2R2Objective,
        configure=configure,
        start=start_from_least_squares,
        added={"features": start_taps, "head": start_head},
    )


def _exit_settings(stream: AcceleratedStream, threshold: float | None) -> dict[str, Any]:
    return {"exit_thresholds": [threshold] * len(stream.config.gates)}


def _margin_settings(stream: AcceleratedStream, point: float | None) -> dict[str, Any]:
    """Settings for a margin of 0 or more. Below 0: margin 0, prompts read by the quantised copy,
    and tokens leave at the threshold 1 + point.
    """
    if point is None or point >= 0:
        return {"margin": point}
    narrow = {"margin": 0.0, "prompt_weights": "narrow"}
    return {**narrow, **_exit_settings(stream, 1 + point)}


def _margin_told(point: float) -> str:
    if point >= 0:
        return f"margin {point:g}"
    return f"margin 0, quantised prompts, threshold {1 + point:.4f}"


def _has_margin(decoder: Decoder, stream: AcceleratedStream) -> bool:
    return (
        len(stream.config.gates) == 1
        and narrow_weights(decoder)
        and NativeStreamRunner.supports(decoder, stream)
    )


MARGINS = (1.0, 0.7, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.0)
MARGIN = DynamicMode(
    gates=lambda stream: stream.config.gates,
    settings=_margin_settings,
    path=(*MARGINS, *(round(probability - 1, 4) for probability in PROBABILITIES)),
    label="margin",
    usable=_has_margin,
    alone=True,
    preferred=True,
    told=_margin_told,
)
DYNAMIC = DynamicMode(
    gates=lambda stream: stream.config.gates,
    settings=_exit_settings,
    path=PROBABILITIES,
    others=(MARGIN,),
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
        drafter=lambda decoder, module, settings: M2R2Drafter(decoder, module, settings),
        step=lambda decoder, module, settings: step_of(decoder, module, settings),
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
        drafter=lambda decoder, module, settings: M2R2Drafter(decoder, module, settings),
        step=lambda decoder, module, settings: step_of(decoder, module, settings),
        dynamic=DYNAMIC,
        tracer=M2R2Tracer,
        training=_training("m2r2-carry"),
        recommended=True,
    )
)
