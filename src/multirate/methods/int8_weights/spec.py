"""Registers plain decoding with weights in 8 bits."""

from __future__ import annotations

from multirate.methods.int8_weights.config import Int8WeightsConfig
from multirate.methods.int8_weights.step import NarrowPlainStep
from multirate.methods.spec import DynamicMode, MethodSpec, register
from multirate.model.native.decoder import narrow_weights

SPEC = register(
    MethodSpec(
        name="int8_weights",
        title="plain decoding with narrow weights: 8 bits, or a file's own 4 (no training)",
        summary="reads the model's weights in 8 bits, its own for tokens in doubt (lossy)",
        settings=Int8WeightsConfig,
        step=lambda decoder, module, settings: NarrowPlainStep(decoder, settings),
        dynamic=DynamicMode(
            gates=lambda module: (),
            settings=lambda module, margin: {"margin": 1e9 if margin is None else margin},
            path=(1.0, 0.7, 0.5, 0.3, 0.2, 0.15, 0.1, 0.05, 0.0),
            label="margin",
            usable=lambda decoder, module: narrow_weights(decoder),
            told="margin {:g}".format,
        ),
        lossless=False,
    )
)
