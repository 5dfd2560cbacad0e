"""Registers plain decoding with weights in 8 bits."""

from __future__ import annotations

from typing import Any

from multirate.methods.int8_weights.config import Int8WeightsConfig
from multirate.methods.int8_weights.step import NarrowPlainStep
from multirate.methods.spec import DynamicMode, MethodSpec, register
from multirate.model.native.decoder import narrow_weights

NARROW_PROMPTS = -1.0
"""The point of the dial with no margin at which the copy reads prompts, too."""


def _settings(module: Any, margin: float | None) -> dict[str, Any]:
    if margin == NARROW_PROMPTS:
        return {"margin": 0.0, "prompt_weights": "narrow"}
    return {"margin": 1e9 if margin is None else margin}


def _told(margin: float) -> str:
    return "margin 0, quantised prompts" if margin == NARROW_PROMPTS else f"margin {margin:g}"


SPEC = register(
    MethodSpec(
        name="int8_weights",
        title="plain decoding with quantised weights: 8 bits, or a file's own 4 (no training)",
        summary=(
            "decodes with 8-bit weights and recomputes uncertain tokens with the "
            "full-precision ones (lossy)"
        ),
        settings=Int8WeightsConfig,
        step=lambda decoder, module, settings: NarrowPlainStep(decoder, settings),
        dynamic=DynamicMode(
            gates=lambda module: (),
            settings=_settings,
            path=(1.0, 0.7, 0.5, 0.3, 0.2, 0.15, 0.1, 0.05, 0.0, NARROW_PROMPTS),
            label="margin",
            usable=lambda decoder, module: narrow_weights(decoder),
            told=_told,
        ),
        lossless=False,
    )
)
