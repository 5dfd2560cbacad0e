"""SpecEE's objective, and where its proposer starts. The backbone is frozen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multirate.lab.depth_baselines._shared.multi_exit import ExitObjective
from multirate.lab.depth_baselines.specee.modules import CANDIDATES, SpecEE, features, read_of
from multirate.methods._shared.distillation import Distilled, TopTokens, distil
from multirate.methods._shared.least_squares import LeastSquares, direction
from multirate.methods._shared.objective import Report
from multirate.methods._shared.teacher import Known, SlowPass, Teacher

JUDGED_ROWS = 256
"""Rows of a batch that predictors learn from: each takes the base, and the head at every exit."""


class SpecEEObjective(ExitObjective):
    """KL of the proposer to the full model's distribution, and at every exit the binary
    cross-entropy of "this exit's argmax is the last layer's, and a candidate".

    The report's agreement is the share of tokens that could leave at an exit. In training the exits
    that were "looked at before" are drawn, half of them in each batch.
    """

    has_arla = True
    has_early_exit = False  # the students are the base's own exits

    def forward(
        self, ids: Tensor, mask: Tensor, known: Known | None = None
    ) -> tuple[Tensor, Report]:
        teacher, module = self._teacher[0], self.module
        slow = teacher.slow(ids, shared=0, known=known)
        rows = _with_one_before(mask)
        said = teacher.norm(module.proposer(_read(slow, rows)))
        target = slow.target(rows)
        proposed = distil(said[None], target, teacher.head, module.draft_tokens)
        logits, able, result = self._exits(ids, rows, known, said.detach(), target)
        if module.training:
            first = able.int().argmax(0)[able.any(0)]
            module.first_exits += first.bincount(minlength=len(module.exits))
        looked = torch.rand(len(module.exits), dtype=torch.float32, device="cpu") < (
            0.5 if module.training else 1.0
        )
        judged, before = [], None
        for which, row in enumerate(logits):
            read, here = features(row, before)
            judged.append(module.judge(which, read))
            before = here if looked[which] else before
        scores = torch.stack(judged)
        judging = F.binary_cross_entropy_with_logits(scores, able.float())
        loss = proposed.kl[0] + judging
        told = scores.detach().float().sigmoid()
        return loss, Report(self.terms, replace(result, agree=able), float(loss.detach()), told)

    @torch.no_grad()
    def _exits(
        self,
        ids: Tensor,
        rows: Tensor,
        known: Known | None,
        said: Tensor,
        target: Tensor | TopTokens,
    ) -> tuple[Tensor, Tensor, Distilled]:
        """Of some of the `rows` [B, T], of which the proposer says said [N, d]: the candidates'
        logits [exits, n, 4], which could leave where [exits, n], and what the plain exits say.
        """
        teacher, module = self._teacher[0], self.module
        few = int((rows.sum(1).cumsum(0) < JUDGED_ROWS).sum()) + 1  # the base runs on these alone
        part = rows[:few]
        some = _spread(int(part.sum()), ids.device)
        slow = teacher.slow(ids[:few], 0, module.exits, None if known is None else known[:few])
        wanted = target[some]
        if isinstance(wanted, TopTokens):
            right = wanted.tokens[:, 0]
        else:
            right = teacher.head.logits(wanted).argmax(-1)
        candidates = self._candidates(said[some])
        normed = self.normed(slow, part)[:, some]
        result = distil(normed, wanted, teacher.head, module.draft_tokens)
        able = result.agree & (candidates == right[:, None]).any(-1)
        return teacher.head.logits_of(normed, candidates), able, result

    def _candidates(self, said: Tensor) -> Tensor:
        """Token ids [n, 4] of what the proposer says, said [n, d] being through the final norm."""
        head, tokens = self._teacher[0].head, self.module.draft_tokens
        reduced = head if tokens is None else head.subset(tokens)
        places = reduced.logits(said).topk(CANDIDATES, dim=-1).indices
        return places if tokens is None else tokens[places]


def _with_one_before(mask: Tensor) -> Tensor:
    """The rows of mask [B, T] that have a token before them."""
    rows = mask.clone()
    rows[:, 0] = False
    return rows


def _read(slow: SlowPass, rows: Tensor) -> Tensor:
    """The proposer's inputs [N, 2 d] at `rows` [B, T]."""
    return read_of(slow.residual[0][rows], slow.final.roll(1, dims=1)[rows])


def _spread(rows: int, device: torch.device) -> Tensor:
    """At most JUDGED_ROWS of so many rows, spread evenly."""
    return torch.linspace(
        0, max(rows - 1, 0), min(rows, JUDGED_ROWS), device=device, dtype=torch.float32
    ).long()


@torch.no_grad()
def start_from_least_squares(
    teacher: Teacher, module: SpecEE, batches: Iterable[tuple[Tensor, Tensor, Any]]
) -> None:
    """The proposer starts as the linear map that best tells the direction of h_L, over the response
    rows of ``batches`` of (ids, mask, known).
    """
    d = teacher.shape.hidden_size
    fit = LeastSquares(2 * d, d)
    for ids, mask, known in batches:
        slow = teacher.slow(ids, shared=0, known=known)
        rows = _with_one_before(mask)
        fit.add(_read(slow, rows), direction(slow.final.float()[rows]))
    module.proposer.linear.weight.copy_(fit.solution().T)
