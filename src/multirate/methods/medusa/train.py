"""Medusa's objective: all heads read the same row."""

from __future__ import annotations

from torch import Tensor

from multirate.methods._shared.heads_objective import HeadsObjective, RowsBefore
from multirate.methods._shared.teacher import SlowPass, Teacher
from multirate.methods.medusa.modules import MedusaHeads


class MedusaObjective(HeadsObjective):
    heads: MedusaHeads

    def students(self, teacher: Teacher, slow: SlowPass, before: RowsBefore) -> list[Tensor]:
        normed = slow.normed.float()
        return [self.heads.student(k, before(normed, k)) for k in range(1, self.count + 1)]
