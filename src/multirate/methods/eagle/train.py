"""EAGLE's objective: the model's next feature, and its distribution."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from multirate.methods._shared.distillation import distil
from multirate.methods._shared.feature_objective import (
    FeatureObjective,
    feature_distances,
    uniform_noise,
)
from multirate.methods._shared.least_squares import LeastSquares, direction
from multirate.methods._shared.objective import Report, shift
from multirate.methods._shared.teacher import Known, Teacher
from multirate.methods.eagle.modules import EagleLayer

NOISE = 0.2
"""Training noise on the features: uniform, of this width times 512 / tokens of the sample."""
KL_WEIGHT = 0.1
"""Of the token distribution, beside the features' loss."""


class EagleObjective(FeatureObjective):
    """(ids [B, T], response mask [B, T]) → SmoothL1 of the features (as the head reads them) +
    KL_WEIGHT · KL.
    """

    layer: EagleLayer

    def forward(
        self, ids: Tensor, mask: Tensor, known: Known | None = None
    ) -> tuple[Tensor, Report]:
        """ids int64 [B, T]; mask bool [B, T], true where the row's *next* token is a response
        token; known: see ``Teacher.slow``.
        """
        teacher, layer = self._teacher[0], self.layer
        slow = teacher.slow(ids, shared=0, known=known)
        carried = shift(slow.final.float())
        if layer.training:
            carried = carried + uniform_noise(ids, carried, NOISE)
        outputs = layer.unrolled(slow.residual[0].float(), carried)
        normed = torch.stack([teacher.norm(x[mask]) for x in outputs])
        result = distil(normed, slow.target(mask), teacher.head, layer.draft_tokens)
        feature = slow.normed[mask].float()
        distances = feature_distances(normed, feature)
        loss = self.mean(distances + KL_WEIGHT * result.kl)
        return loss, Report(self.terms, result, float(loss.detach()))


@torch.no_grad()
def start_from_least_squares(
    teacher: Teacher, layer: EagleLayer, batches: Iterable[tuple[Tensor, Tensor, Any]]
) -> None:
    """Initialises W by least squares: the linear map from its input that best predicts the
    direction of h_L, over the response rows of ``batches`` of (ids, mask, known). [ours]
    """
    d = teacher.shape.hidden_size
    fit = LeastSquares(2 * d, d)
    for ids, mask, known in batches:
        slow = teacher.slow(ids, shared=0, known=known)
        final = slow.final.float()
        carried = layer.carried_norm(shift(final))
        read = torch.cat([slow.residual[0].float(), carried], dim=-1)
        fit.add(read[mask], direction(final)[mask])
    layer.fc.weight.copy_(fit.solution().T)
