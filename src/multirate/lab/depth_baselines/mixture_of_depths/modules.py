"""Mixture-of-Depths' routers and causal predictors beside a frozen base.

    n = x / rms(x), x entering routed block l;   r_l = w_l · n;   s_l = sigmoid(u_l · n + c_l)

r ranks a text's tokens in training; s, which looks at no other token, is the probability that a
token is not among those that run the block (the paper: a small MLP). [ours: the norm]
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from multirate.errors import UserError
from multirate.lab.depth_baselines.mixture_of_depths.config import MixtureOfDepthsConfig
from multirate.methods._shared.least_squares import direction
from multirate.methods._shared.shape import BaseShape

EPS = 1e-6


class Routers(nn.Module):
    def __init__(self, config: MixtureOfDepthsConfig, base: BaseShape) -> None:
        super().__init__()
        config.check_base(base)
        self.config = config
        shape = len(config.blocks), base.hidden_size
        self.router = nn.Parameter(torch.zeros(shape))
        self.predictor = nn.Parameter(torch.zeros(shape))
        self.bias = nn.Parameter(torch.zeros(shape[0]))

    def weight(self, which: int, hidden: Tensor) -> Tensor:
        """r [...] of residuals [..., d] entering the `which`-th routed block."""
        return direction(hidden.float(), EPS) @ self.router[which].float()

    def left_out(self, which: int, hidden: Tensor) -> Tensor:
        """Logits of s [...]."""
        read = direction(hidden.float(), EPS)
        return read @ self.predictor[which].float() + self.bias[which].float()


def refuse_windows(windows: tuple[int | None, ...], blocks: tuple[int, ...]) -> None:
    """UserError for routed blocks with a sliding window: it is counted in cache slots, and these
    are not positions where tokens are missing.
    """
    for i in blocks:
        if windows[i] is not None:
            raise UserError(
                f"mixture_of_depths' block {i} has a sliding window; accepted: blocks with full "
                "attention"
            )
