"""The layers that trained methods add beside a frozen base: RMSNorm, rotary attention with its own
K/V, SwiGLU.

A native kernel computes the same formulas, so they are stated exactly and kept plain:

* RMSNorm        y = w * x / sqrt(mean(x^2) + eps), the mean taken in float32
* rotary         transformers' Llama form: frequency theta^(-2i/D) for i < D/2, dimension i is
                 paired with i + D/2, (a, b) -> (a cos - b sin, b cos + a sin)
* attention      softmax(q.k / sqrt(D)) v, query head h reads K/V head h // (H / H_kv)
* SwiGLU         down(silu(gate(x)) * up(x))
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multirate.methods._shared.shape import BaseShape
from multirate.runtime.captured import CapturedRows, StaticSlots
from multirate.runtime.draft_branch import BranchLayer
from multirate.runtime.kv_cache import KVCache, LayerKV
from multirate.runtime.rows import MAX_TREE_BIT, Rows

KeysValues = tuple[Tensor, Tensor]
"""Keys after rotary and values of one pass over a batch, each [B, H_kv, T, D]."""


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps). [..., d] → [..., d]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear map without bias that starts at zero."""
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.zeros_(linear.weight)
    return linear


def rotate(x: Tensor, pos: Tensor, theta: float) -> Tensor:
    """Rotary embedding, half-rotation form. x [..., H, T, D] with pos [T] or [B, 1, T] → same
    shape.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = pos[..., None].float() * frequency  # [..., T, D/2]
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def visible_slots(prefix: np.ndarray, tree: np.ndarray, slots: int) -> np.ndarray:
    """bool [n, slots]: slot s is seen when s < prefix, or when bit s − prefix of tree is set (bits
    0 to 62).
    """
    offset = np.arange(slots)[None, :] - prefix[:, None].astype(np.int64)
    bits = (tree[:, None].astype(np.int64) >> np.clip(offset, 0, MAX_TREE_BIT)) & 1
    return (offset < 0) | ((bits == 1) & (offset >= 0) & (offset <= MAX_TREE_BIT))


class OwnAttention(nn.Module):
    """Grouped-query rotary attention that keeps its own keys and values (not the base's).

    inputs: width of what it reads; None: of what it writes, `size`.
    """

    def __init__(
        self,
        size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        theta: float,
        inputs: int | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.theta = heads, kv_heads, head_dim, theta
        inputs = size if inputs is None else inputs
        self.q = nn.Linear(inputs, heads * head_dim, bias=False)
        self.k = nn.Linear(inputs, kv_heads * head_dim, bias=False)
        self.v = nn.Linear(inputs, kv_heads * head_dim, bias=False)
        self.o = nn.Linear(heads * head_dim, size, bias=False)

    def project(self, x: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, d], pos [T] → q [B, H, T, D] and k, v [B, H_kv, T, D]; rotary applied to q and
        k.
        """
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        return rotate(q, pos, self.theta), rotate(k, pos, self.theta), v

    def forward(self, x: Tensor, earlier: Sequence[KeysValues] = ()) -> tuple[Tensor, KeysValues]:
        """Training pass of draft step s = len(earlier) + 1 over x [B, T, inputs] → ([B, T, d],
        this step's K/V).

        Step 1 is plain causal attention. A row of step s at position t was reached by drafting s
        tokens from a root at t − s + 1: it sees step 1's K/V at positions ≤ t − s + 1 and step j's
        K/V at t − s + j for j = 2..s, its own included. Rows at t < s − 1 have no root and see only
        the steps that exist there.
        """
        batch, length, _ = x.shape
        q, k, v = self.project(x, torch.arange(length, device=x.device))
        if not earlier:
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
            )
        else:
            mixed = self._unrolled(q, [*earlier, (k, v)])
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1)), (k, v)

    def _unrolled(self, q: Tensor, steps: Sequence[KeysValues]) -> Tensor:
        batch, heads, length, dim = q.shape
        depth = len(steps)
        q = q.view(batch, self.kv_heads, heads // self.kv_heads, length, dim) * dim**-0.5
        first_k, first_v = steps[0]
        position = torch.arange(length, device=q.device)
        root = position[:, None] - (depth - 1)
        scores = [
            (q @ first_k[:, :, None].transpose(-1, -2)).masked_fill(
                position[None, :] > root, -torch.inf
            )
        ]
        shifted_values = []
        for j, (k, v) in enumerate(steps[1:], start=2):
            shift = depth - j
            near_k, near_v = (F.pad(t, (0, 0, shift, 0))[:, :, :length] for t in (k, v))
            score = (q * near_k[:, :, None]).sum(-1, keepdim=True)  # [B, H_kv, rep, T, 1]
            scores.append(score.masked_fill((position < shift)[:, None], -torch.inf))
            shifted_values.append(near_v)
        weights = torch.cat([s.float() for s in scores], dim=-1).softmax(-1).to(first_v.dtype)
        mixed = weights[..., :length] @ first_v[:, :, None]
        for j, near_v in enumerate(shifted_values):
            mixed = mixed + weights[..., length + j, None] * near_v[:, :, None]
        return mixed.reshape(batch, heads, length, dim)

    def new_cache(self, batch: int, capacity: int, captured: CapturedRows | None = None) -> KVCache:
        """An empty one-layer cache for ``rows``, in this module's dtype and device; one that
        ``captured`` can capture over.
        """
        weight = self.k.weight
        layout = [LayerKV(self.kv_heads, self.head_dim, self.head_dim, weight.dtype, weight.device)]
        if captured is not None:
            return captured.new_cache(batch, capacity, layout)
        return KVCache(batch, capacity, layout)

    def rows(self, x: Tensor, rows: Rows | StaticSlots, cache: KVCache | None) -> Tensor:
        """Decode form, x [N, inputs] → [N, d]: K/V go to ``rows.slot`` (≥ 0) of the one-layer
        ``cache`` before any row attends; row n then sees the slots its prefix and tree name.
        StaticSlots stand for both, in passes that are captured.
        """
        if isinstance(rows, StaticSlots):
            q, k, v = self.project(x[None], rows.pos)
            keys, values = rows.attended(k, v)
            mixed = F.scaled_dot_product_attention(
                q,
                keys.to(q.dtype),
                values.to(q.dtype),
                attn_mask=rows.seen,
                enable_gqa=self.heads != self.kv_heads,
            )
            return self.o(mixed[0].transpose(0, 1).reshape(x.shape[0], -1))
        assert cache is not None
        cache.note_positions(rows)
        keys, values = cache.keys[0], cache.values[0]  # [B, H_kv, capacity, D]
        q, k, v = self.project(x[None], torch.as_tensor(rows.pos, device=x.device))  # [1, H, N, D]
        q, k, v = q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)  # [N, H, D]
        writes = np.flatnonzero(rows.slot >= 0)
        seq, slot, index = (
            torch.as_tensor(a.astype(np.int64), device=x.device)
            for a in (rows.seq[writes], rows.slot[writes], writes)
        )
        keys[seq, :, slot] = k[index].to(keys.dtype)
        values[seq, :, slot] = v[index].to(values.dtype)
        mixed = torch.empty_like(q)
        ends = rows.visible_end()
        for one in np.unique(rows.seq):
            mine = np.flatnonzero(rows.seq == one)
            end = int(ends[mine].max())
            seen = torch.as_tensor(
                visible_slots(rows.prefix[mine], rows.tree[mine], end), device=x.device
            )
            here = torch.as_tensor(mine, device=x.device)
            mixed[here] = F.scaled_dot_product_attention(
                q[here].transpose(0, 1)[None],
                keys[int(one)][None, :, :end].to(q.dtype),
                values[int(one)][None, :, :end].to(q.dtype),
                attn_mask=seen,
                enable_gqa=self.heads != self.kv_heads,
            )[0].transpose(0, 1)
        return self.o(mixed.reshape(x.shape[0], -1))


def branch_layer(
    attention: OwnAttention, mlp: SwiGLU | None, eps: float, **norms: RMSNorm | None
) -> BranchLayer:
    """The description of such a layer. norms: as BranchLayer's fields of these names."""
    return BranchLayer(
        q=attention.q.weight,
        k=attention.k.weight,
        v=attention.v.weight,
        o=attention.o.weight,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        theta=attention.theta,
        eps=eps,
        mlp=None if mlp is None else (mlp.gate.weight, mlp.up.weight, mlp.down.weight),
        **{name: None if norm is None else norm.weight for name, norm in norms.items()},
    )


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)). [..., d] → [..., d]."""

    def __init__(self, size: int, intermediate: int) -> None:
        super().__init__()
        self.gate = nn.Linear(size, intermediate, bias=False)
        self.up = nn.Linear(size, intermediate, bias=False)
        self.down = nn.Linear(intermediate, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class DecoderBlock(nn.Module):
    """A Llama-like layer of the base's sizes with its own K/V: y = x + attn(norm(x)), y +
    swiglu(norm(y)). Starts as the identity.
    """

    def __init__(self, base: BaseShape) -> None:
        super().__init__()
        d = base.hidden_size
        self.attn_norm, self.mlp_norm = RMSNorm(d, base.norm_eps), RMSNorm(d, base.norm_eps)
        self.attn = OwnAttention(
            d, base.num_heads, base.num_kv_heads, base.head_dim, base.rope_theta
        )
        self.mlp = SwiGLU(d, base.whole_tiles)
        nn.init.zeros_(self.attn.o.weight)
        nn.init.zeros_(self.mlp.down.weight)

    def forward(self, x: Tensor, earlier: Sequence[KeysValues] = ()) -> tuple[Tensor, KeysValues]:
        """Training pass of draft step len(earlier) + 1 (see ``OwnAttention.forward``). [B, T, d] →
        same, K/V.
        """
        mixed, keys_values = self.attn(self.attn_norm(x), earlier)
        y = x + mixed
        return y + self.mlp(self.mlp_norm(y)), keys_values

    def rows(self, x: Tensor, rows: Rows | StaticSlots, cache: KVCache | None) -> Tensor:
        """Decode step: x [N, d] → [N, d]. ``cache`` comes from ``attn.new_cache``; ``rows.slot``
        says where each row's K/V go (−1: nowhere).
        """
        y = x + self.attn.rows(self.attn_norm(x), rows, cache)
        return y + self.mlp(self.mlp_norm(y))

    def description(self) -> BranchLayer:
        """For decoders that have a form of their own."""
        return branch_layer(
            self.attn,
            self.mlp,
            self.attn_norm.eps,
            norm_attention=self.attn_norm,
            norm_mlp=self.mlp_norm,
        )
