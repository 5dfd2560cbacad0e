"""EAGLE-3's objective: the base's distribution over the draft vocabulary, through the layer's own
drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from multirate.methods.common.distillation import distil
from multirate.methods.common.least_squares import LeastSquares
from multirate.methods.common.objective import Objective, Report, Term, shift
from multirate.methods.common.teacher import Known, SlowPass, Teacher
from multirate.methods.eagle3.modules import Eagle3Layer

_STARTING_BATCHES = 8
"""The base runs up to the last tap for each."""
_SHARPEST = 8
"""Rotary pairs, the fastest ones, by which attention starts at the token itself."""
_OWN_SCORE = 20.0
"""Of the token itself at the start; others get less the farther they are."""


class Eagle3Objective(Objective):
    """(ids [B, T], response mask [B, T]) → Σ w KL / Σ w over draft steps s, w = decay^(s − 1)."""

    has_early_exit = False  # it reads residuals up to the last layers

    def __init__(self, teacher: Teacher, layer: Eagle3Layer, step_decay: float = 0.8) -> None:
        super().__init__()
        self.layer, self.step_decay = layer, step_decay
        self._teacher = [teacher]  # in a list: the base's weights are not this module's parameters

    @property
    def terms(self) -> list[Term]:
        depth, steps = self._teacher[0].shape.num_layers, self.layer.config.unroll_steps
        return [Term(depth, s, self.step_decay ** (s - 1)) for s in range(1, steps + 1)]

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
        weight = torch.tensor([t.weight for t in self.terms], device=result.kl.device)
        loss = (weight * result.kl).sum() / weight.sum()
        return loss, Report(self.terms, result, float(loss.detach()))


@torch.no_grad()
def start_from_least_squares(
    teacher: Teacher, layer: Eagle3Layer, batches: Iterable[tuple[Tensor, Tensor, Any]]
) -> None:
    """The head starts as the base's, and the layer as the linear map that best tells the base's
    normed h_L from the taps one token earlier and the embedding. [ours]

    The embedding's part goes through values and output of attention (its best approximation of
    their rank); queries and keys start so that a token sees itself best.
    """
    tokens, d = layer.draft_tokens, teacher.shape.hidden_size
    head = teacher.head.weight.float() * teacher.head.scale
    layer.head.weight.copy_(head if tokens is None else head[tokens])
    fit, ones = LeastSquares((len(layer.taps) + 1) * d, d), LeastSquares(d, 1)
    squares, rows = torch.zeros(d), 0
    for ids, mask, known in islice(batches, _STARTING_BATCHES):
        slow = teacher.slow(ids, shared=0, gates=layer.taps, known=known)
        embedded = layer.embedding_norm(slow.residual[0].float())[mask]
        wanted = slow.normed.float()[mask]
        fit.add(torch.cat([_tapped(layer, slow)[mask], embedded], dim=-1), wanted)
        ones.add(embedded, torch.ones(len(embedded), 1, device=embedded.device))
        squares += wanted.square().sum(0).cpu()
        rows += len(wanted)
    scale = (squares / max(rows, 1)).sqrt().clamp(min=1e-3)
    layer.norm.weight.copy_(scale)
    best = fit.solution() / scale  # the norm multiplies by it again
    layer.fc.weight.copy_(best[:-d].T)
    _start_attention(layer, best[-d:], fit.squares[-d:, -d:], ones.solution()[:, 0])


def _tapped(layer: Eagle3Layer, slow: SlowPass) -> Tensor:
    """The taps' residuals [B, T, taps · d] of the token before each."""
    return shift(torch.cat([slow.residual[tap].float() for tap in layer.taps], dim=-1))


def _start_attention(layer: Eagle3Layer, wanted: Tensor, squares: Tensor, constant: Tensor) -> None:
    """One query head of every key/value head says, for each token, ``wanted`` [d, d] of its own
    normed embedding. squares [d, d]: of these embeddings; constant [d]: what tells 1 from them.
    """
    attention, d = layer.attn, len(wanted)
    dim, group = attention.head_dim, attention.heads // attention.kv_heads
    rank = attention.kv_heads * dim
    _, directions = torch.linalg.eigh(wanted.T @ squares @ wanted)  # rising
    kept = directions[:, -min(rank, d) :]  # [d, rank]: where most of what is said lies
    values = torch.zeros(rank, attention.v.in_features)
    values[: kept.shape[1], :d] = (wanted @ kept).T
    attention.v.weight.copy_(values)
    said = torch.zeros(d, rank)
    said[:, : kept.shape[1]] = kept
    pairs = min(_SHARPEST, dim // 2)
    strength = (_OWN_SCORE * dim**0.5 / pairs) ** 0.5
    query = torch.zeros(dim, attention.q.in_features)
    query[:pairs, :d] = strength * constant
    for head in range(attention.kv_heads):
        own = slice(head * group * dim, (head * group + 1) * dim)
        attention.q.weight[own] = query
        attention.o.weight[:, own] = said[:, head * dim : (head + 1) * dim]
        keys = attention.k.weight[head * dim : (head + 1) * dim]
        keys[:pairs] = query[:pairs]
        keys[dim // 2 : dim // 2 + pairs] = 0
