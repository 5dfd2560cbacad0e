"""The accelerated residual at a mixture layer: where the stream is going, seen from here.

r_i: the slow residual after layer i's attention, a_i the accelerated state (a_{-1} = 0), n an RMSNorm without weight:

    z_i     = SiLU(D_i [n(r_i); n(a_{i-1})])
    p_{i,δ} = r_i + U_{i,δ} z_i            which layer i + δ's own norm and router read, for δ = 1 … ahead
    a_i     = p_{i,1}

U starts at zero: untrained, p is the slow residual itself, and naming experts with it is the next layer's gate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from multirate.methods.m2r2_experts.config import ExpertForecastConfig
from multirate.methods.shape import BaseShape


class ExpertForecast(nn.Module):
    """``down`` [L, rank, 2d] and ``up[δ − 1]`` [L, d, rank], for every layer of the base (dense ones are not used)."""

    def __init__(self, config: ExpertForecastConfig, base: BaseShape) -> None:
        super().__init__()
        config.check_base(base)
        self.config, self.base = config, base
        layers, d = base.num_layers, base.hidden_size
        self.down = nn.Parameter(torch.randn(layers, config.rank, 2 * d) * (2 * d) ** -0.5)
        self.up = nn.ParameterList([nn.Parameter(torch.zeros(layers, d, config.rank)) for _ in range(config.ahead)])

    def step(self, layer: int, residual: Tensor, state: Tensor | None, depths: int | None = None) -> list[Tensor]:
        """r [N, d] of layer ``layer`` and a of the mixture layer before (None: there is none) → p of depths 1 … depths
        (None: all), [N, d] each; the first is the state for the next one."""
        r = residual.to(self.down.dtype)
        before = torch.zeros_like(r) if state is None else normalised(state)
        z = nn.functional.silu(torch.cat([normalised(r), before], dim=-1) @ self.down[layer].T)
        return [r + z @ up[layer].T for up in list(self.up)[:depths]]


def normalised(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / rms(x) over the last dimension."""
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype)
