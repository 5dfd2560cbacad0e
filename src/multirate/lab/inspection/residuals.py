"""How a residual moves through the layers: speed, direction, and how far from where it ends.

Everywhere residuals is h_0 … h_L: n tokens' residuals entering each layer and the last one's
output, [n, d] each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def velocity(residuals: Sequence[Tensor]) -> Tensor:
    """‖h_{i+1} − h_i‖ / ‖h_i‖ of every layer i: [L, n]."""
    h = _stacked(residuals)
    return (h[1:] - h[:-1]).norm(dim=-1) / h[:-1].norm(dim=-1).clamp(min=_LEAST)


def residual_direction(residuals: Sequence[Tensor]) -> Tensor:
    """cos(h_i, h_{i+1}) of every layer i: [L, n]; 1: the layer does not turn the residual."""
    h = _stacked(residuals)
    return F.cosine_similarity(h[:-1], h[1:], dim=-1)


def change_direction(residuals: Sequence[Tensor]) -> Tensor:
    """cos of what layer i and what layer i + 1 add: [L − 1, n]; 1: both push the same way."""
    h = _stacked(residuals)
    change = h[1:] - h[:-1]
    return F.cosine_similarity(change[:-1], change[1:], dim=-1)


def alignment(states: Sequence[Tensor], final: Tensor) -> Tensor:
    """cos(state, final) of states [n, d] with the final residual [n, d]: [len(states), n]."""
    return F.cosine_similarity(_stacked(states), final.float()[None], dim=-1)


@dataclass(frozen=True)
class Quartiles:
    """Over the tokens, for each row of values [rows, n]."""

    lower: list[float]
    median: list[float]
    upper: list[float]

    @staticmethod
    def of(values: np.ndarray) -> Quartiles:
        """values [rows, n], n > 0."""
        lower, median, upper = np.quantile(values.astype(np.float64), [0.25, 0.5, 0.75], axis=1)
        return Quartiles(lower.tolist(), median.tolist(), upper.tolist())


_LEAST = 1e-12


def _stacked(states: Sequence[Tensor]) -> Tensor:
    return torch.stack([state.float() for state in states])
