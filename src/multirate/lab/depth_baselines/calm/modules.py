"""CALM's classifiers: is what the head says at this exit what it will say after the last layer?

One linear map for each exit, on the residual as the head reads it, after the final norm (the
paper: one for all layers, on the layer's output). [ours]
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from multirate.lab.depth_baselines._shared.multi_exit import TrainedExits
from multirate.lab.depth_baselines.calm.config import CalmClassifierConfig
from multirate.methods._shared.shape import BaseShape


class ExitClassifiers(TrainedExits):
    def __init__(self, config: CalmClassifierConfig, base: BaseShape) -> None:
        super().__init__(config, base)
        self.weight = nn.Parameter(torch.zeros(len(config.exits), base.hidden_size))
        self.bias = nn.Parameter(torch.zeros(len(config.exits)))

    def forward(self, normed: Tensor) -> Tensor:
        """normed [K, N, d], the rows at every exit → logits of agreement [K, N]."""
        return torch.einsum("knd,kd->kn", normed, self.weight) + self.bias[:, None]

    def score(self, which: int, normed: Tensor) -> Tensor:
        """Probability of agreement [n] at the exit of place `which`, of its rows [n, d]."""
        return torch.sigmoid((normed @ self.weight[which] + self.bias[which]).float())
