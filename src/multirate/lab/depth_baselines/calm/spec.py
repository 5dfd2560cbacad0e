"""Registers CALM without training, and with trained classifiers, and has their objective."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multirate.decoding.dynamic_depth import DynamicDepthStep
from multirate.lab.depth_baselines._shared.exits import register_exits
from multirate.lab.depth_baselines._shared.multi_exit import ExitObjective
from multirate.lab.depth_baselines.calm.config import (
    CalmClassifierConfig,
    CalmClassifierDecodeConfig,
    CalmConfig,
)
from multirate.lab.depth_baselines.calm.exits import trained_exits, untrained_exits
from multirate.lab.depth_baselines.calm.modules import ExitClassifiers
from multirate.methods._shared.distillation import distil
from multirate.methods._shared.objective import Report, balanced_bce
from multirate.methods._shared.teacher import Known
from multirate.methods.spec import PROBABILITIES, DynamicMode, Training

REDUCED_HEAD = 16384
"""Tokens of the head that a comparison without training reads exits with: the whole one of a
small model costs as much as eight layers, at every exit.
"""


class CalmObjective(ExitObjective):
    """Balanced binary cross-entropy of "this exit says what the last layer says", at every exit.
    The report's agreement is that of the base's plain exits.
    """

    has_arla = True
    has_early_exit = False  # the students are the base's own exits

    def forward(
        self, ids: Tensor, mask: Tensor, known: Known | None = None
    ) -> tuple[Tensor, Report]:
        teacher, classifiers = self._teacher[0], self.module
        slow = teacher.slow(ids, shared=0, gates=classifiers.exits, known=known)
        normed = self.normed(slow, mask)
        with torch.no_grad():
            result = distil(normed, slow.target(mask), teacher.head, classifiers.draft_tokens)
        logits = classifiers(normed.float())
        each = [balanced_bce(row, agree) for row, agree in zip(logits, result.agree, strict=True)]
        loss = torch.stack(each).mean()
        scores = logits.detach().float().sigmoid()
        return loss, Report(self.terms, result, float(loss.detach()), scores)


def _dial(path: tuple[float, ...], *others: DynamicMode, **fixed: Any) -> DynamicMode:
    """Thresholds that do not decay: at the end of the text the decay lowers each to 0.9 of itself,
    where a base that was not trained for exits needs 0.99 and more. [ours]
    """

    def settings(_: Any, threshold: float | None) -> dict[str, Any]:
        return {**fixed, "decay": 0.0, "threshold": threshold}

    def gates(module: Any) -> tuple[int, ...]:
        return () if module is None else module.exits

    return DynamicMode(gates, settings, path, others)


_MARGINS = (0.9999, 0.9995, 0.999, 0.998, 0.995, 0.99, 0.98, 0.95, 0.9, 0.8, 0.6)
_COSINES = (0.99, 0.98, 0.97, 0.96, 0.955, 0.95, 0.945, 0.94, 0.93, 0.92, 0.9)

UNTRAINED = register_exits(
    name="calm",
    title="CALM (arXiv 2207.07061, no training)",
    summary="skips a token's remaining layers once its confidence passes a decaying threshold "
    "(lossy)",
    settings=CalmConfig,
    step=lambda decoder, module, settings: DynamicDepthStep(
        untrained_exits(decoder, settings), "propagate"
    ),
    dynamic=_dial(
        _MARGINS,
        _dial(_COSINES, confidence="state"),
        confidence="softmax",
        draft_vocab=REDUCED_HEAD,
    ),
)
TRAINED = register_exits(
    name="calm-classifier",
    title="CALM with trained exit classifiers (arXiv 2207.07061; reconstructed)",
    summary="skips a token's remaining layers once a trained classifier accepts the exit (lossy)",
    settings=CalmClassifierDecodeConfig,
    step=lambda decoder, module, settings: DynamicDepthStep(
        trained_exits(decoder, module, settings), "propagate"
    ),
    dynamic=_dial(PROBABILITIES),
    training=Training(CalmClassifierConfig, ExitClassifiers, CalmObjective),
)
