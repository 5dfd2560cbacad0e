"""EAGLE-3's objective: the base's distribution over the draft vocabulary, through the layer's own
drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from multirate.methods._shared.distillation import distil
from multirate.methods._shared.feature_objective import FeatureObjective
from multirate.methods._shared.least_squares import LeastSquares
from multirate.methods._shared.objective import Report, shift
from multirate.methods._shared.teacher import Known, Teacher
from multirate.methods.eagle3.modules import Eagle3Layer

_STARTING_BATCHES = 8
"""The base runs up to the last tap for each."""
_SHARPEST = 8
"""Rotary pairs, the fastest ones, by which attention starts at the token itself."""
_OWN_SCORE = 20.0
"""Of the token itself at the start; others get less the farther they are."""
_GATE = 4.0
"""What the MLP's gates start at, before their SiLU."""


class Eagle3Objective(FeatureObjective):
    """(ids [B, T], response mask [B, T]) → KL over the draft vocabulary."""

    layer: Eagle3Layer

    def forward(
        self, ids: Tensor, mask: Tensor, known: Known | None = None
    ) -> tuple[Tensor, Report]:
        """ids int64 [B, T]; mask bool [B, T], true where the row's *next* token is a response
        token; known: see ``Teacher.slow``.
        """
        teacher, layer = self._teacher[0], self.layer
        slow = teacher.slow(ids, shared=0, gates=layer.taps, known=known)
        inner = {tap: slow.residual[tap].float() for tap in layer.taps}
        carried = shift(layer.carried(slow.final, inner))
        outputs = layer.unrolled(slow.residual[0].float(), carried)
        normed = torch.stack([layer.norm(x[mask]) for x in outputs])
        result = distil(
            normed, slow.target(mask), teacher.head, layer.draft_tokens, layer.head.weight
        )
        loss = self.mean(result.kl)
        return loss, Report(self.terms, result, float(loss.detach()))


@dataclass
class _Rows:
    """A batch that the layer is fitted to: taps [B, T, taps · d], embedded, wanted [B, T, d]."""

    taps: Tensor
    embedded: Tensor
    wanted: Tensor
    mask: Tensor


@torch.no_grad()
def start_from_least_squares(
    teacher: Teacher, layer: Eagle3Layer, batches: Iterable[tuple[Tensor, Tensor, Any]]
) -> None:
    """The head starts as the base's, and the layer as the linear maps that best tell the base's
    normed h_L: of the token before from the taps (what the layer's own outputs stand for, too), and
    of the token itself from that and the embedding. [ours]

    The embedding goes through attention, whose queries and keys start so that a token sees itself
    best, into the directions that the taps' part uses least; the MLP reads both.
    """
    d = teacher.shape.hidden_size
    layer.head.weight.copy_(teacher.head.own_start(layer.draft_tokens))
    some = [
        _rows(teacher, layer, *batch)
        for batch in islice((batch for batch in batches if batch[1].any()), _STARTING_BATCHES)
    ]
    scale = _size(rows.wanted[rows.mask] for rows in some)  # the own norm multiplies by it again
    layer.norm.weight.copy_(scale)
    sizes = _size(rows.taps[rows.mask] for rows in some)
    layer.tap_sizes.copy_(sizes)
    same, joint = (LeastSquares(len(layer.taps) * d + more, d) for more in (0, d))
    ones = LeastSquares(d, 1)
    for rows in some:
        rows.wanted /= scale
        same.add(rows.taps[rows.mask] / sizes, rows.wanted[rows.mask])
        embedded = layer.embedding_norm(rows.embedded)[rows.mask]
        both = torch.cat([shift(rows.taps)[rows.mask] / sizes, embedded], dim=-1)
        joint.add(both, rows.wanted[rows.mask])
        ones.add(
            embedded, torch.ones(len(embedded), 1, device=embedded.device, dtype=torch.float32)
        )
    best = same.solution()
    layer.fc.weight.copy_(best.T)
    used = torch.linalg.eigh(best.T @ same.squares @ best)[1]  # the least used directions first
    said = joint.solution()[-d:]
    _start_attention(layer, said, joint.squares[-d:, -d:], ones.solution()[:, 0], used)
    _start_mlp(layer, some)


def _size(parts: Iterable[Tensor]) -> Tensor:
    """Root mean square of each channel of rows [n, channels]."""
    rows = torch.cat(list(parts))
    return rows.square().mean(0).sqrt().clamp(min=1e-3)


def _rows(
    teacher: Teacher, layer: Eagle3Layer, ids: Tensor, mask: Tensor, known: Known | None
) -> _Rows:
    slow = teacher.slow(ids, shared=0, gates=layer.taps, known=known)
    taps = torch.cat([slow.residual[tap].float() for tap in layer.taps], dim=-1)
    return _Rows(taps, slow.residual[0].float(), slow.normed.float().clone(), mask)


def _start_attention(
    layer: Eagle3Layer, said: Tensor, squares: Tensor, constant: Tensor, onto: Tensor
) -> None:
    """One query head of every key/value head says, of each token's own normed embedding, the most
    of ``said`` [d, d] that their rank allows, in the first directions of ``onto`` [d, d]. squares
    [d, d]: of the embeddings; constant [d]: what tells 1 from them.
    """
    attention, d = layer.attn, len(said)
    dim, group = attention.head_dim, attention.heads // attention.kv_heads
    rank = min(attention.kv_heads * dim, d)
    _, directions = torch.linalg.eigh(said.T @ squares @ said)  # rising
    attention.v.weight.zero_()
    attention.v.weight[:rank, :d] = (said @ directions[:, -rank:]).T
    pairs = min(_SHARPEST, dim // 2)
    query = torch.zeros(dim, attention.q.in_features, dtype=torch.float32, device="cpu")
    query[:pairs, :d] = (_OWN_SCORE * dim**0.5 / pairs) ** 0.5 * constant
    for head in range(attention.kv_heads):
        own, values = head * group * dim, slice(head * dim, min((head + 1) * dim, rank))
        attention.q.weight[own : own + dim] = query
        attention.o.weight[:, own : own + values.stop - values.start] = onto[:, values]
        keys = attention.k.weight[head * dim : (head + 1) * dim]
        keys[:pairs] = query[:pairs]
        keys[dim // 2 : dim // 2 + pairs] = 0


def _start_mlp(layer: Eagle3Layer, some: list[_Rows]) -> None:
    """As the linear map from its normed input to what is missing, by nearly constant gates."""
    d = layer.base.hidden_size
    fit, ones = LeastSquares(d, d), LeastSquares(d, 1)
    for rows in some:
        x, read = layer.entering(rows.embedded, shift(layer.fc(rows.taps / layer.tap_sizes)))
        y = (x + layer.attn(read)[0])[rows.mask]
        normed = layer.mlp_norm(y)
        fit.add(normed, rows.wanted[rows.mask] - y)
        ones.add(normed, torch.ones(len(normed), 1, device=normed.device, dtype=torch.float32))
    left, strength, right = torch.linalg.svd(fit.solution())
    rank = min(layer.config.intermediate, d)
    open_gate = float(
        torch.nn.functional.silu(torch.tensor(_GATE, dtype=torch.float32, device="cpu"))
    )
    root = (strength[:rank] / open_gate).sqrt()
    layer.mlp.gate.weight[:rank] = _GATE * ones.solution()[:, 0]
    layer.mlp.up.weight[:rank] = (left[:, :rank] * root).T
    layer.mlp.down.weight[:, :rank] = (root[:, None] * right[:rank]).T
