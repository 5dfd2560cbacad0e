"""The objective of heads that read the final residual (Medusa, Hydra): head k's distribution at a
row against the full model's, k rows later.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multirate.methods._shared.distillation import distil
from multirate.methods._shared.objective import Objective, Report, Term, step_weight
from multirate.methods._shared.teacher import Known, SlowPass, Teacher

RowsBefore = Callable[[Tensor, int], Tensor]
"""(states [B, T, d], k) → the states k rows before each row t that is taught, [N, d]."""


def taught_rows(mask: Tensor, count: int) -> tuple[Tensor, RowsBefore]:
    """The rows t that teach `count` heads (bool [B, T]): those that head k reads, t - k, for all k,
    and t itself have response tokens next (mask bool [B, T]), as when drafting.
    """
    length = max(mask.shape[1] - count, 0)
    earlier = [slice(count - k, count - k + length) for k in range(count + 1)]
    taught = torch.stack([mask[:, rows] for rows in earlier]).all(0)
    rows = torch.zeros_like(mask)
    rows[:, count:] = taught
    return rows, lambda states, k: states[:, earlier[k]][taught]


class HeadsObjective(Objective):
    """KL to the full model, head k's weighted by `step_weight`.

    The papers' losses are other ones; this is that of the other methods here.
    """

    has_early_exit = False  # the heads read the last layer

    def __init__(self, teacher: Teacher, heads: Any) -> None:
        super().__init__(teacher)
        self.heads, self.count = heads, heads.config.heads

    @abstractmethod
    def students(self, teacher: Teacher, slow: SlowPass, before: RowsBefore) -> list[Tensor]:
        """Of heads 1, 2, … what is said of the token after each taught row: [N, d] each, normed.
        Head k reads the row k before it, and of later rows at most their tokens.
        """

    @property
    def terms(self) -> list[Term]:
        depth = self._teacher[0].shape.num_layers
        return [Term(depth, k, step_weight(k)) for k in range(1, self.count + 1)]

    def forward(
        self, ids: Tensor, mask: Tensor, known: Known | None = None
    ) -> tuple[Tensor, Report]:
        """See Objective. Rows count whose next K + 1 tokens are all response tokens."""
        teacher = self._teacher[0]
        slow = teacher.slow(ids, shared=0, known=known)
        # what the teacher says at row t head k must say at row t - k
        rows, before = taught_rows(mask, self.count)
        students = self.students(teacher, slow, before)
        result = distil(
            torch.stack(students), slow.target(rows), teacher.head, self.heads.draft_tokens
        )
        loss, _ = self.weighted(result.kl)
        return loss, Report(self.terms, result, float(loss.detach()))
