"""EAGLE's way of training on features: its loss and noise, and what the objectives of layers that
draft from features share.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from multirate.methods._shared.feature_branch import FeatureBranch
from multirate.methods._shared.objective import Objective, Term, step_weight
from multirate.methods._shared.teacher import Teacher

_NOISE_TOKENS = 512
"""Samples of so many tokens get the config's noise, shorter ones more."""


def uniform_noise(ids: Tensor, carried: Tensor, width: float) -> Tensor:
    """Uniform numbers [B, T, d] in units of each row's size, the same for a batch whenever it
    comes, so that a resumed run ends with the same weights.
    """
    generator = torch.Generator(device="cpu").manual_seed(int(ids.sum()))
    uniform = (
        torch.rand(carried.shape, generator=generator, dtype=torch.float32, device="cpu").to(
            carried.device
        )
        - 0.5
    )
    size = carried.square().mean(-1, keepdim=True).sqrt()
    return uniform * size * (width * _NOISE_TOKENS / ids.shape[1])


def feature_distances(normed: Tensor, feature: Tensor) -> Tensor:
    """SmoothL1 of normed rows [K, N, d] from the model's own [N, d]: [K], zeros without rows."""
    if not len(feature):
        return torch.zeros(len(normed), device=normed.device, dtype=torch.float32)
    return torch.stack([F.smooth_l1_loss(x.float(), feature) for x in normed])


class FeatureObjective(Objective):
    """The mean over draft steps s = 1 … unroll_steps, weighted by `step_weight`."""

    has_early_exit = False  # features come from the last layers

    def __init__(self, teacher: Teacher, layer: FeatureBranch) -> None:
        super().__init__(teacher)
        self.layer = layer

    @property
    def terms(self) -> list[Term]:
        depth, steps = self._teacher[0].shape.num_layers, self.layer.config.unroll_steps
        return [Term(depth, s, step_weight(s)) for s in range(1, steps + 1)]

    def mean(self, losses: Tensor) -> Tensor:
        """Of the steps' losses [unroll_steps]."""
        loss, weight = self.weighted(losses)
        return loss / weight
