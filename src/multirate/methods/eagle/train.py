"""EAGLE's objective: the model's next feature, and its distribution."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multirate.methods.common.distillation import distil
from multirate.methods.common.feature_objective import FeatureObjective
from multirate.methods.common.least_squares import LeastSquares, direction
from multirate.methods.common.objective import Report, shift
from multirate.methods.common.teacher import Known, Teacher
from multirate.methods.eagle.modules import EagleLayer

_NOISE_TOKENS = 512
"""Samples of so many tokens get the config's noise, shorter ones more."""


class EagleObjective(FeatureObjective):
    """(ids [B, T], response mask [B, T]) → SmoothL1 of the features (as the head reads them) +
    kl_weight · KL.
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
            carried = carried + _noise(ids, carried, layer.config.noise)
        outputs = layer.unrolled(slow.residual[0].float(), carried)
        normed = torch.stack([teacher.norm(x[mask]) for x in outputs])
        result = distil(normed, slow.target(mask), teacher.head, layer.draft_tokens)
        feature = slow.normed[mask].float()
        distances = torch.stack([F.smooth_l1_loss(x.float(), feature) for x in normed])
        if not mask.any():
            distances = torch.zeros_like(result.kl)
        loss = self.mean(distances + layer.config.kl_weight * result.kl)
        return loss, Report(self.terms, result, float(loss.detach()))


def _noise(ids: Tensor, carried: Tensor, width: float) -> Tensor:
    """Uniform numbers [B, T, d] in units of each row's size, the same for a batch whenever it
    comes, so that a resumed run ends with the same weights.
    """
    generator = torch.Generator().manual_seed(int(ids.sum()))
    uniform = torch.rand(carried.shape, generator=generator).to(carried.device) - 0.5
    size = carried.square().mean(-1, keepdim=True).sqrt()
    return uniform * size * (width * _NOISE_TOKENS / ids.shape[1])


@torch.no_grad()
def start_from_least_squares(
    teacher: Teacher, layer: EagleLayer, batches: Iterable[tuple[Tensor, Tensor, Any]]
) -> None:
    """W starts as the linear map that best tells the direction of h_L from what it reads, over the
    response rows of ``batches`` of (ids, mask, known). [ours]
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
