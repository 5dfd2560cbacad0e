"""The accelerated residual stream beside a frozen base: carry → adapted layers → fusion and block
at the gate → the base's head.

One token at position t, gate G, h_i the slow residual entering layer i, c the carried residual (h_L
of position t − 1 when verified, the stream's own output at t − 1 while drafting, zeros at t = 0;
with taps i, j, …, h_L + W_t [h_i; h_j; …] / s when verified):

    p_0     = h_0 + W_c RMSNorm(c)                          (carry; else p_0 = h_0)
    p_{i+1} = layer_i(p_i) with q, o, … + low-rank deltas, over the slow K/V of layer i
              at positions ≤ t
    f       = W_f [RMSNorm(p_G), RMSNorm(c)]                (fuse; else p_G)
    p       = block_G(f)                                    (block; else f)
    draft   = lm_head(final_norm(p)), both the base's own and frozen

With several gates and ``reinitialise`` the stream restarts as h_{G_j} after gate j (paper); the
carry enters layer 0 only, and the fusion. Every added path starts at zero, so that without training
the draft is the base's plain early exit at G (the fusion starts as p_G alone); training starts the
fusion from least squares (train.py).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from multirate.methods._shared.layers import DecoderBlock, RMSNorm
from multirate.methods._shared.reduced_head import first_tokens, limited_to
from multirate.methods._shared.shape import BaseShape
from multirate.methods.m2r2.arla import ARLA
from multirate.methods.m2r2.config import M2R2Config
from multirate.runtime.decoder import Decoder
from multirate.runtime.draft_branch import (
    Agreement,
    BranchHead,
    DraftBranch,
    Features,
    Linear,
)


class LowRank(nn.Module):
    """x → up(down(x)) through ``rank`` dimensions, without bias or scale; ``up`` starts at zero.
    [..., in] → [..., out].
    """

    def __init__(self, d_in: int, d_out: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(d_in, rank, bias=False)
        self.up = nn.Linear(rank, d_out, bias=False)
        nn.init.normal_(self.down.weight, std=d_in**-0.5)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class LayerAdapter(nn.Module):
    """The low-rank deltas of one layer: each adds to the output of its site, computed from the
    site's own input.

    Sites: q, o (attention), gate, up, down (the MLP's projections), mlp (beside the whole MLP:
    input is the normed residual, output is added to the MLP's).
    """

    def __init__(self, config: M2R2Config, base: BaseShape) -> None:
        super().__init__()
        d, inner, wide = base.hidden_size, base.intermediate_size, base.num_heads * base.head_dim
        sizes: dict[str, tuple[int, int]] = {}
        if config.attention_adapter:
            sizes |= {"q": (d, wide), "o": (wide, d)}
        if config.mlp_adapter == "lora":
            sizes |= {"gate": (d, inner), "up": (d, inner), "down": (inner, d)}
        elif config.mlp_adapter == "parallel":
            sizes |= {"mlp": (d, d)}
        self.sites = nn.ModuleDict(
            {site: LowRank(*size, config.rank) for site, size in sizes.items()}
        )

    def deltas(self) -> dict[str, nn.Module]:
        """Site name → module."""
        return dict(self.sites.items())


class CarryProjection(nn.Module):
    """W RMSNorm(c): what the carried residual adds to the stream's start. W starts at zero. [...,
    d] → [..., d].
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(size, eps)
        self.proj = nn.Linear(size, size, bias=False)
        nn.init.zeros_(self.proj.weight)

    def forward(self, carried: Tensor) -> Tensor:
        return self.proj(self.norm(carried))


class TapFeatures(nn.Module):
    """W [h_i; h_j; …] / s: what the tapped residuals add to h_L, [..., taps · d] → [..., d]. W
    starts at zero. s are the channels' sizes, measured when training starts (train.py), because
    some channels are hundreds of times larger than others.
    """

    sizes: Tensor

    def __init__(self, taps: tuple[int, ...], size: int) -> None:
        super().__init__()
        self.taps = taps
        self.register_buffer("sizes", torch.ones(len(taps) * size))
        self.proj = nn.Linear(len(taps) * size, size, bias=False)
        nn.init.zeros_(self.proj.weight)

    def read(self, inner: Mapping[int, Tensor]) -> Tensor:
        """The taps' residuals [..., d] side by side."""
        return torch.cat([inner[layer] for layer in self.taps], dim=-1)

    def forward(self, inner: Mapping[int, Tensor]) -> Tensor:
        out: Tensor = self.proj(self.read(inner) / self.sizes)
        return out

    def weight(self) -> Tensor:
        """W divided by the channels' sizes, [d, taps · d]."""
        return self.proj.weight / self.sizes


class GateFusion(nn.Module):
    """W [RMSNorm(p), RMSNorm(c)]: mixes the stream at a gate with the carried residual, [..., d]
    each → [..., d]. W starts by passing p through. carry: whether there is a c.
    """

    def __init__(self, size: int, eps: float, carry: bool) -> None:
        super().__init__()
        self.stream_norm = RMSNorm(size, eps)
        self.stream = nn.Linear(size, size, bias=False)
        nn.init.eye_(self.stream.weight)
        self.carried_norm = RMSNorm(size, eps) if carry else None
        self.carried = nn.Linear(size, size, bias=False) if carry else None
        if self.carried is not None:
            nn.init.zeros_(self.carried.weight)

    def read(self, x: Tensor, carried: Tensor | None) -> Tensor:
        """The input of W: [..., d] or [..., 2d]. carried None: nothing carried."""
        own: Tensor = self.stream_norm(x)
        if self.carried_norm is None:
            return own
        other = torch.zeros_like(x) if carried is None else self.carried_norm(carried)
        return torch.cat([own, other], dim=-1)

    def forward(self, x: Tensor, carried: Tensor | None) -> Tensor:
        out: Tensor = self.stream(self.stream_norm(x))
        if self.carried is None or self.carried_norm is None or carried is None:
            return out
        return out + self.carried(self.carried_norm(carried))


class AcceleratedStream(nn.Module):
    """All trained modules of M2R2. ``adapters`` are keyed by layer index, ``fusions`` and
    ``blocks`` by gate, as strings (ModuleDict keys).
    """

    carry: CarryProjection | None
    features: TapFeatures | None
    arla: ARLA | None
    draft_tokens: Tensor | None
    """[draft_vocab] int64 ids of the reduced draft head's rows, increasing; None: the full head."""

    def __init__(self, config: M2R2Config, base: BaseShape) -> None:
        super().__init__()
        config.check_base(base)
        self.config, self.base = config, base
        self.carry = CarryProjection(base.hidden_size, base.norm_eps) if config.carry else None
        self.features = TapFeatures(config.taps, base.hidden_size) if config.taps else None
        adapted = config.attention_adapter or config.mlp_adapter != "none"
        self.adapters = nn.ModuleDict(
            {str(i): LayerAdapter(config, base) for i in range(config.gates[-1])} if adapted else {}
        )
        self.fusions = nn.ModuleDict(
            {
                str(gate): GateFusion(base.hidden_size, base.norm_eps, config.carry)
                for gate in config.gates
            }
            if config.fuse
            else {}
        )
        self.blocks = nn.ModuleDict(
            {str(gate): DecoderBlock(base) for gate in config.gates} if config.block else {}
        )
        self.arla = (
            ARLA(base.hidden_size, config.arla_dim, len(config.gates)) if config.arla_dim else None
        )
        self.register_buffer("draft_tokens", first_tokens(config.draft_vocab))

    def carried(self, hidden: Tensor, inner: Mapping[int, Tensor]) -> Tensor:
        """What verified tokens carry, from their h_L [..., d] and the tapped residuals."""
        return hidden if self.features is None else hidden + self.features(inner)

    def start(self, embedded: Tensor, carried: Tensor | None) -> Tensor:
        """p_0 from h_0 [..., d] and the carried residual [..., d] (ignored without carry; None:
        nothing carried).
        """
        if self.carry is None or carried is None:
            return embedded
        return embedded + self.carry(carried)

    def layer_adapters(self) -> dict[int, LayerAdapter]:
        """Layer index → adapter, as ``Decoder.layers`` expects."""
        return {int(i): adapter for i, adapter in self.adapters.items()}  # type: ignore[misc]

    def fuse(self, gate: int, x: Tensor, carried: Tensor | None) -> Tensor:
        """The stream [..., d] that enters the block at ``gate`` (carried None: nothing carried)."""
        if not self.fusions:
            return x
        fused: Tensor = self.fusions[str(gate)](x, carried)
        return fused

    def block(self, gate: int) -> DecoderBlock | None:
        """The block at ``gate``, None without blocks."""
        return self.blocks[str(gate)] if self.blocks else None  # type: ignore[return-value]

    def branch(self, gate: int) -> DraftBranch:
        """What is computed up to `gate`, for decoders that have a form of their own."""
        carry, features, block = self.carry, self.features, self.block(gate)
        fusion: Any = self.fusions[str(gate)] if self.fusions else None
        mixed = fusion is not None and fusion.carried is not None
        agreement = None
        if self.arla is not None and gate == self.config.gates[0]:
            arla = copy.deepcopy(self.arla).float()
            weight, inner, out, bias = (part.detach() for part in arla.of_one_gate())
            agreement = Agreement(weight, inner, out, float(bias))
        return DraftBranch(
            exit_layer=gate,
            adapters={i: a for i, a in self.layer_adapters().items() if i < gate} or None,
            carry=None if carry is None else Linear(carry.proj.weight, carry.norm.weight),
            fuse_branch=fusion and Linear(fusion.stream.weight, fusion.stream_norm.weight),
            fuse_carried=(
                Linear(fusion.carried.weight, fusion.carried_norm.weight) if mixed else None
            ),
            layer=None if block is None else block.description(),
            features=(
                None if features is None else Features(features.taps, features.weight(), added=True)
            ),
            head=BranchHead(self.draft_tokens),
            agreement=agreement,
            eps=self.base.norm_eps,
        )

    def logits(self, decoder: Decoder, p: Tensor) -> Tensor:
        """Logits of outputs p [n, d]: float32 [n, V], −inf outside draft_tokens."""
        return limited_to(self.draft_tokens, decoder.logits(p))
