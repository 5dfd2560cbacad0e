"""What the kernel computes, in plain PyTorch and float64: a test compares each function with its
counterpart here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from multirate.runtime.rows import Rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., D], cos, sin [..., D / 2]: halves are rotated against each other, as transformers'
    Llama does.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def dequantised(integers: Tensor, units: Tensor) -> Tensor:
    """What integer weights [out, in] with one unit [out] each stand for."""
    return integers.double() * units.double()[:, None]


def dequantised_by_block(integers: Tensor, units: Tensor) -> Tensor:
    """What integer weights [out, in] with units [out, blocks] of 32 inputs each stand for."""
    each = units.double().repeat_interleave(32, dim=1)[:, : integers.shape[1]]
    return integers.double() * each


def rounded_by_block(x: Tensor, blocks: int, terms: int) -> Tensor:
    """x [N, in] as the sum of `terms` terms of 127 steps either way, for each 32 inputs."""
    whole = torch.zeros(len(x), blocks * 32)
    whole[:, : x.shape[1]] = x
    rest = whole.view(len(x), blocks, 32)
    kept = torch.zeros_like(rest, dtype=torch.float64)
    for _ in range(terms):
        largest = rest.abs().amax(dim=2, keepdim=True)
        unit = torch.full_like(largest, 127) / largest  # torch's 127 / x is another number
        steps = (rest * torch.where(largest > 0, unit, 0)).round()
        kept += steps.double() * (largest / 127).double()
        rest = (whole.view_as(rest).double() - kept).float()
    return kept.view(len(x), -1)[:, : x.shape[1]]


def low_rank(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ a.T @ b.T


@dataclass
class LayerWeights:
    """One layer. Shapes [out, in]; vectors by their width; a norm that is None is left out.
    norm_all_heads: q_norm and k_norm are of all heads together. norm_after_rotary: they come after
    the rotation. query_scale: by position. rotated: so many dimensions of a head are, the first
    ones.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    norm_attention: Tensor | None
    norm_mlp: Tensor | None
    norm_attention_out: Tensor | None = None
    norm_mlp_out: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_all_heads: bool = False
    norm_after_rotary: bool = False
    query_scale: Tensor | None = None
    rotated: int = 0
    gelu: bool = False
    residual_scale: float = 1.0
    window: int = 0
    adapters: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def delta(self, site: str, x: Tensor, adapted: Tensor) -> Tensor | float:
        """What the site's adapter adds to the rows that have adapters [N]."""
        if site not in self.adapters:
            return 0.0
        a, b = (one.double() for one in self.adapters[site])
        return low_rank(x, a, b) * adapted[:, None]


def layer(
    x: Tensor,
    weights: LayerWeights,
    rows: Rows,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> Tensor:
    """x [N, d] entering → leaving. keys, values [S, H_kv, capacity, D]: read, and written at the
    rows' slots.
    """
    w = weights
    dim = keys.shape[3]
    adapted = (
        torch.zeros(len(rows))
        if rows.accelerated is None
        else torch.from_numpy(rows.accelerated).double()
    )
    pos = torch.from_numpy(rows.pos).long()
    normed = _normed(x, w.norm_attention, eps)
    q = normed @ w.q.T + w.delta("q", normed, adapted)
    k, v = (normed @ one.T for one in (w.k, w.v))
    if w.norm_all_heads:
        q, k = _normed(q, w.q_norm, eps), _normed(k, w.k_norm, eps)
    q, k, v = (one.unflatten(-1, (-1, dim)) for one in (q, k, v))
    if not w.norm_all_heads and not w.norm_after_rotary:
        q, k = _normed(q, w.q_norm, eps), _normed(k, w.k_norm, eps)
    if w.rotated:
        q, k = (
            torch.cat(
                [
                    rotate(one[..., : w.rotated], cos[pos][:, None], sin[pos][:, None]),
                    one[..., w.rotated :],
                ],
                dim=-1,
            )
            for one in (q, k)
        )
    if w.norm_after_rotary:
        q, k = _normed(q, w.q_norm, eps), _normed(k, w.k_norm, eps)
    if w.query_scale is not None:
        q = q * w.query_scale[pos][:, None, None]
    for n, slot in enumerate(rows.slot):
        if slot >= 0:
            keys[rows.seq[n], :, slot], values[rows.seq[n], :, slot] = k[n], v[n]
    out = torch.stack([_attend(q[n], rows, n, keys, values, w.window) for n in range(len(rows))])
    out = _normed(out @ w.o.T + w.delta("o", out, adapted), w.norm_attention_out, eps)
    x = x + w.residual_scale * out
    normed = _normed(x, w.norm_mlp, eps)
    gate = normed @ w.gate.T + w.delta("gate", normed, adapted)
    passed = (
        torch.nn.functional.gelu(gate, approximate="tanh")
        if w.gelu
        else torch.nn.functional.silu(gate)
    )
    inner = passed * (normed @ w.up.T + w.delta("up", normed, adapted))
    out = inner @ w.down.T + w.delta("down", inner, adapted) + w.delta("mlp", normed, adapted)
    return x + w.residual_scale * _normed(out, w.norm_mlp_out, eps)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else rms_norm(x, weight, eps)


def visible_slots(rows: Rows, n: int, window: int) -> list[int]:
    """The slots that row n sees, in the order of its path."""
    prefix, tree = int(rows.prefix[n]), int(rows.tree[n])
    slots = [*range(prefix), *(prefix + bit for bit in range(63) if tree >> bit & 1)]
    first = max(int(rows.pos[n]) - window + 1, 0) if window else 0
    return slots[first:]  # along its path a token's position is its index


def _attend(q: Tensor, rows: Rows, n: int, keys: Tensor, values: Tensor, window: int) -> Tensor:
    """q [H, D] of row n → [H * D]."""
    seq, slots = int(rows.seq[n]), visible_slots(rows, n, window)
    k, v = (t[seq][:, slots].repeat_interleave(len(q) // t.shape[1], dim=0) for t in (keys, values))
    scores = torch.einsum("hd,hsd->hs", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("hs,hsd->hd", scores.softmax(-1), v).flatten()


def route(
    x: Tensor, router: Tensor, norm: Tensor, eps: float, k: int, normalise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, d], router [experts, d] → normed [N, d], the k likeliest experts [N, k], weights
    [N, k].
    """
    normed = rms_norm(x, norm, eps)
    weights, ids = (normed @ router.T).softmax(-1).topk(k)
    return normed, ids, weights / weights.sum(-1, keepdim=True) if normalise else weights


def expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """x [N, d], gate and up [I, d], down [d, I] → [N, d]."""
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def predicted_residual(
    residual: Tensor,
    state: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    a: Tensor,
    b: Tensor,
    down: Tensor,
    up: Tensor,
    eps: float,
) -> Tensor:
    """residual, state [N, d], ids, weights [N, k], a [rank, 2d], b [d, rank], down, up [experts,
    rows, d] → residual + B SiLU(A [n(residual); n(state)]) + Σ share · SiLU(down n(residual)) up.
    """
    ones = torch.ones(residual.shape[1], dtype=residual.dtype)
    normed = rms_norm(residual, ones, eps)
    other = torch.zeros_like(residual) if state is None else rms_norm(state, ones, eps)
    found = residual + torch.nn.functional.silu(torch.cat([normed, other], -1) @ a.T) @ b.T
    shares = weights / weights.sum(-1, keepdim=True)
    inner = torch.nn.functional.silu(torch.einsum("nd,nkrd->nkr", normed, down[ids]))
    return found + torch.einsum("nk,nkr,nkrd->nd", shares, inner, up[ids])


def pruned_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    means: Tensor,
    eps: float,
) -> Tensor:
    """x [N, d], ids, weights [N, k], gate, up, down [experts, rows, d], means [experts, d] → x plus
    what a few neurons of its experts add, and the mean of what the others do.
    """
    normed = rms_norm(x, torch.ones(x.shape[1], dtype=x.dtype), eps)
    shares = weights / weights.sum(-1, keepdim=True)
    inner = torch.nn.functional.silu(torch.einsum("nd,nkrd->nkr", normed, gate[ids]))
    inner = inner * torch.einsum("nd,nkrd->nkr", normed, up[ids])
    added = torch.einsum("nkr,nkrd->nkd", inner, down[ids]) + means[ids]
    return x + torch.einsum("nk,nkd->nd", shares, added)
