"""Medusa's objective: head k's distribution at a row against the full model's, k rows later."""

from __future__ import annotations

import torch
from torch import Tensor

from multirate.methods.common.distillation import distil
from multirate.methods.common.objective import Objective, Report, Term
from multirate.methods.common.teacher import Known, Teacher
from multirate.methods.medusa.modules import MedusaHeads


class MedusaObjective(Objective):
    """KL to the full model, head k's weighted by `step_decay` to the power k - 1.

    The paper's loss is the cross-entropy with the text; ours is that of the other methods here.
    """

    has_early_exit = False  # the heads read the last layer

    def __init__(self, teacher: Teacher, heads: MedusaHeads, step_decay: float = 0.8) -> None:
        super().__init__()
        self.heads, self.step_decay = heads, step_decay
        self._teacher = [teacher]  # in a list: the base's weights are not this module's parameters

    @property
    def terms(self) -> list[Term]:
        teacher, heads = self._teacher[0], self.heads.config.heads
        return [
            Term(teacher.shape.num_layers, k, self.step_decay ** (k - 1))
            for k in range(1, heads + 1)
        ]

    def forward(
        self, ids: Tensor, mask: Tensor, known: Known | None = None
    ) -> tuple[Tensor, Report]:
        """See Objective. Rows count whose next K + 1 tokens are all response tokens, as when
        drafting.
        """
        teacher, count = self._teacher[0], self.heads.config.heads
        slow = teacher.slow(ids, shared=0, known=known)
        normed = slow.normed
        # what the teacher says at row t head k must say at row t - k
        length = max(ids.shape[1] - count, 0)
        earlier = [slice(count - k, count - k + length) for k in range(count + 1)]
        taught = torch.stack([mask[:, rows] for rows in earlier]).all(0)
        students = self.heads(normed.float())  # [K, B, T, d]
        pairs = zip(students, earlier[1:], strict=True)
        shifted = torch.stack([student[:, rows][taught] for student, rows in pairs])
        rows = torch.zeros_like(mask)
        rows[:, count:] = taught
        result = distil(shifted, slow.target(rows), teacher.head)
        weights = torch.tensor([term.weight for term in self.terms], device=result.kl.device)
        loss = (weights * result.kl).sum()
        return loss, Report(self.terms, result, float(loss.detach()))
