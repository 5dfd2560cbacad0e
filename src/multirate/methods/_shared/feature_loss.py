"""EAGLE's way of training on features, for every stream whose rows stand for normed h_L."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
