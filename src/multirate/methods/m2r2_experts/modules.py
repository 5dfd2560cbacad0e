"""The accelerated residual at a mixture layer: where the stream is going, seen from here.

r_i: the slow residual after layer i's attention, a_i the accelerated state (a_{-1} = 0), n an RMSNorm without weight,
w_i the weights that layer i's router gave its experts (zero for those it did not choose):

    z_i     = [SiLU(D_i [n(r_i); n(a_{i-1})]); w_i ⊙ SiLU(S_i n(r_i))]     S_i: a few rows for each expert
    p_{i,δ} = r_i + U_{i,δ} z_i            which layer i + δ's own norm and router read, for δ = 1 … ahead
    a_i     = p_{i,1}

The second part of z is a sketch of the experts at work: a few rows stand for each, those of the others are zero.
U starts at zero: untrained, p is the slow residual itself, and naming experts with it is the next layer's gate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from multirate.methods.m2r2_experts.config import ExpertForecastConfig
from multirate.methods.shape import BaseShape

Routing = tuple[Tensor, Tensor]
"""A layer's experts [N, k] and the weights that its router gave them [N, k]."""


class ExpertForecast(nn.Module):
    """``down`` [L, rank, 2d], ``sketch`` [L, E · s, d] and ``up[δ − 1]`` [L, d, rank + E · s], for every layer of the
    base (dense ones are not used)."""

    def __init__(self, config: ExpertForecastConfig, base: BaseShape) -> None:
        super().__init__()
        config.check_base(base)
        self.config, self.base = config, base
        layers, d, rows = base.num_layers, base.hidden_size, base.num_experts * config.sketch
        self.down = nn.Parameter(torch.randn(layers, config.rank, 2 * d) * (2 * d) ** -0.5)
        self.sketch = nn.Parameter(torch.randn(layers, rows, d) * d**-0.5) if rows else None
        self.up = nn.ParameterList(
            [nn.Parameter(torch.zeros(layers, d, config.rank + rows)) for _ in range(config.ahead)]
        )

    def step(
        self, layer: int, residual: Tensor, state: Tensor | None, depths: int | None = None,
        routing: Routing | None = None,
    ) -> list[Tensor]:
        """r [N, d] of layer ``layer`` and a of the mixture layer before (None: there is none) → p of depths 1 … depths
        (None: all), [N, d] each; the first is the state for the next one. routing: of this layer (needed for sketches).
        """
        r = residual.to(self.down.dtype)
        x = normalised(r)
        before = torch.zeros_like(r) if state is None else normalised(state)
        z = nn.functional.silu(torch.cat([x, before], dim=-1) @ self.down[layer].T)
        if self.sketch is not None:
            assert routing is not None
            drawn = nn.functional.silu(x @ self.sketch[layer].T)
            z = torch.cat([z, drawn * self._shares(routing, drawn)], dim=-1)
        return [r + z @ up[layer].T for up in list(self.up)[:depths]]

    def _shares(self, routing: Routing, like: Tensor) -> Tensor:
        """The weight of each sketch row's expert, a token's adding up to 1, [N, E · s]."""
        experts, weights = routing
        shares = (weights / weights.sum(-1, keepdim=True)).to(like.dtype)
        whole = like.new_zeros(len(experts), self.base.num_experts).scatter_(1, experts, shares)
        return whole.repeat_interleave(self.config.sketch, dim=1)


def normalised(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / rms(x) over the last dimension."""
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype)
