"""Hydra's objective: each head is given the text's own tokens for those that it would have drafted
after.
"""

from __future__ import annotations

from torch import Tensor

from multirate.methods.common.heads_objective import HeadsObjective, RowsBefore
from multirate.methods.common.teacher import SlowPass, Teacher
from multirate.methods.hydra.modules import HydraHeads


class HydraObjective(HeadsObjective):
    """See HeadsObjective."""

    def __init__(self, teacher: Teacher, heads: HydraHeads, step_decay: float = 0.8) -> None:
        super().__init__(teacher, heads.config.heads, step_decay)
        self.heads = heads

    @property
    def draft_tokens(self) -> Tensor | None:
        return self.heads.draft_tokens

    def students(self, teacher: Teacher, slow: SlowPass, before: RowsBefore) -> list[Tensor]:
        heads, embedded = self.heads, slow.residual[0].float()
        final = slow.final.float()
        read = teacher.norm(final if heads.prefix is None else heads.prefix(final))
        said = []
        for k in range(1, self.count + 1):
            z = before(read, k)
            for back in range(k - 1, -1, -1):  # the tokens up to the taught row's own
                z = heads.joined(z, before(embedded, back))
            said.append(heads.student(k, z))
        return said
