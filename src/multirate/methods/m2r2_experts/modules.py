"""The accelerated residual at a mixture layer: where the stream is going, seen from here.

r_i: the slow residual after layer i's attention, a_i the accelerated state (a_{-1} = 0), n an
RMSNorm without weight, w_i the weights that layer i's router gave its experts (zero for those it
did not choose):

    z_i     = [SiLU(D_i [n(r_i); n(a_{i-1})]); w_i ⊙ SiLU(S_i n(r_i))]
              S_i: a few rows for each expert
    p_{i,δ} = r_i + U_{i,δ} z_i
              which layer i + δ's own norm and router read, for δ = 1 … ahead
    a_i     = p_{i,1}

The second part of z is the pruned experts (`sketch`): a few rows stand for each, those of experts
that were not chosen are zero. U starts at zero: untrained, p is the slow residual itself, and
predicting experts with it is the next layer's gate.

With ``attention`` the stream also runs the later layers' own attention A, over the slow residual's
keys and values:

    z_i     = [SiLU(D_i n(r_i)); w_i ⊙ SiLU(S_i n(r_i)) ⊙ V_i n(r_i); w_i]
              the pruned experts gated as the whole ones are, and a constant for each: the
              mean of what pruning leaves out
    x_i     = r_i + U_i z_i
              what leaves layer i's experts
    p_{i,1} = x_i + A_{i+1}(x_i)
              what layer i + 1's router reads
    p_{i,2} = the same from layer i + 1, with r = p_{i,1} and w what its router gives for that;
              and so on

It needs no a_{i-1}: what that told about the stream's course, attention tells better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from multirate.methods._shared.shape import BaseShape
from multirate.methods.m2r2_experts.config import ExpertPredictorConfig

Routing = tuple[Tensor, Tensor]
"""A layer's experts [N, k] and the weights that its router gave them [N, k]."""


@dataclass(frozen=True)
class Arrival:
    """The stream at the router of mixture layer ``layer`` [N, d], and what that router makes of
    it.
    """

    layer: int
    residual: Tensor
    routing: Routing


class Onward(Protocol):
    """Carries rows on through the base's own layers."""

    def __call__(self, layer: int, leaving: Tensor) -> Arrival | None:
        """Rows [N, d] that leave mixture layer ``layer`` → where they reach the next mixture's
        router; None: there is no such layer. Each row attends to the slow residual's K/V of the
        tokens before it, and to its own.
        """
        ...


class ExpertPredictor(nn.Module):
    """``down`` [L, rank, 2d], ``sketch`` [L, E · s, d] and ``up[δ − 1]`` [L, d, rank + E · s], for
    every layer of the base (dense ones are not used). With ``attention``: ``down`` [L, rank, d] or
    None, beside ``sketch`` also ``gated`` [L, E · s, d], and a single ``up`` [L, d, rank + E · s +
    E].
    """

    def __init__(self, config: ExpertPredictorConfig, base: BaseShape) -> None:
        super().__init__()
        config.check_base(base)
        self.config, self.base = config, base
        layers, d, rows = base.num_layers, base.hidden_size, base.num_experts * config.sketch
        seen, depths = (d, 1) if config.attention else (2 * d, config.ahead)
        features = config.rank + rows + (base.num_experts if rows and config.attention else 0)
        drawn = torch.randn(layers, config.rank, seen) * seen**-0.5
        self.down = nn.Parameter(drawn) if config.rank else None
        self.sketch = nn.Parameter(torch.randn(layers, rows, d) * d**-0.5) if rows else None
        self.gated = (
            nn.Parameter(torch.randn(layers, rows, d) * d**-0.5)
            if rows and config.attention
            else None
        )
        self.up = nn.ParameterList(
            [nn.Parameter(torch.zeros(layers, d, features)) for _ in range(depths)]
        )

    def step(
        self,
        layer: int,
        residual: Tensor,
        state: Tensor | None,
        depths: int | None = None,
        routing: Routing | None = None,
        onward: Onward | None = None,
    ) -> list[Tensor]:
        """r [N, d] of layer ``layer`` and a of the mixture layer before (None: there is none) → p
        of depths 1 … depths (None: all), [N, d] each; the first is the state for the next one.
        routing: of this layer (needed for pruned experts).

        onward: the base's layers, needed with ``attention``; then p are as many as there are
        mixtures left.
        """
        dtype = self.up[0].dtype
        r = residual.to(dtype)
        if not self.config.attention:
            z = self.features(layer, r, state, routing)
            return [r + z @ up[layer].T for up in list(self.up)[:depths]]
        assert onward is not None, "a predictor with attention runs the base's layers"
        found: list[Tensor] = []
        for _ in range(self.config.ahead if depths is None else depths):
            arrival = onward(
                layer, r + self.features(layer, r, None, routing) @ self.up[0][layer].T
            )
            if arrival is None:
                break
            layer, r, routing = arrival.layer, arrival.residual.to(dtype), arrival.routing
            found.append(r)
        return found

    def features(
        self, layer: int, r: Tensor, state: Tensor | None, routing: Routing | None
    ) -> Tensor:
        """z of the rows r [N, d] at layer ``layer`` (arguments as for ``step``)."""
        x = normalised(r)
        seen = x
        if not self.config.attention:
            seen = torch.cat(
                [x, torch.zeros_like(r) if state is None else normalised(state)], dim=-1
            )
        parts = [] if self.down is None else [nn.functional.silu(seen @ self.down[layer].T)]
        if self.sketch is not None:
            assert routing is not None
            drawn = nn.functional.silu(x @ self.sketch[layer].T)
            shares = self._shares(routing, drawn)
            of_rows = shares.repeat_interleave(self.config.sketch, dim=1)
            if self.gated is None:
                parts.append(drawn * of_rows)
            else:
                parts += [drawn * (x @ self.gated[layer].T) * of_rows, shares]
        return torch.cat(parts, dim=-1)

    def _shares(self, routing: Routing, like: Tensor) -> Tensor:
        """The weight of each expert, a token's adding up to 1, [N, E]."""
        experts, weights = routing
        shares = (weights / weights.sum(-1, keepdim=True)).to(like.dtype)
        return like.new_zeros(len(experts), self.base.num_experts).scatter_(1, experts, shares)


def normalised(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / rms(x) over the last dimension."""
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype)
