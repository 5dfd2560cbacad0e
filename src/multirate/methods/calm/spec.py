"""Registers CALM without training, and with trained classifiers."""

from __future__ import annotations

import math
from typing import Any

from multirate.decoding.dynamic_depth import DynamicDepthStep
from multirate.methods.calm.config import (
    CalmClassifierConfig,
    CalmClassifierDecodeConfig,
    CalmConfig,
)
from multirate.methods.calm.exits import trained_exits, untrained_exits
from multirate.methods.calm.modules import ExitClassifiers
from multirate.methods.calm.train import CalmObjective
from multirate.methods.spec import DynamicMode, MethodSpec, Training, register


def _dial(confidence: str, path: tuple[float, ...], *others: DynamicMode) -> DynamicMode:
    def settings(_: Any, threshold: float | None) -> dict[str, Any]:
        return {"confidence": confidence, "threshold": threshold}

    return DynamicMode(
        gates=lambda module: () if module is None else module.config.exits,
        settings=settings,
        path=path,
        others=others,
    )


_MARGINS = (0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
_COSINES = (0.999, 0.998, 0.995, 0.99, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.85, 0.8)
_SIGMOIDS = tuple(1 / (1 + math.exp(-step / 2)) for step in range(10, -3, -1))

UNTRAINED = register(
    MethodSpec(
        name="calm",
        title="CALM (arXiv 2207.07061, no training)",
        summary="lets a token leave where its confidence passes a decaying threshold (lossy)",
        settings=CalmConfig,
        step=lambda decoder, module, settings: DynamicDepthStep(
            untrained_exits(decoder, settings), settings.kv
        ),
        dynamic=_dial("softmax", _MARGINS, _dial("state", _COSINES)),
        role="depth",
        lossless=False,
    )
)
TRAINED = register(
    MethodSpec(
        name="calm-classifier",
        title="CALM with trained exit classifiers (arXiv 2207.07061; reconstructed)",
        summary="lets a token leave where a trained classifier trusts its exit (lossy)",
        settings=CalmClassifierDecodeConfig,
        step=lambda decoder, module, settings: DynamicDepthStep(
            trained_exits(decoder, module, settings), settings.kv
        ),
        dynamic=_dial("classifier", _SIGMOIDS, _dial("softmax", _MARGINS)),
        training=Training(CalmClassifierConfig, ExitClassifiers, CalmObjective),
        role="depth",
        lossless=False,
    )
)
