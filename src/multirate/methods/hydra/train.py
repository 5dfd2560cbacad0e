"""Hydra's objective: each head is given the text's own tokens for those that it would have drafted
after.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from multirate.methods._shared.heads_objective import HeadsObjective, RowsBefore, taught_rows
from multirate.methods._shared.least_squares import LeastSquares, enough
from multirate.methods._shared.teacher import SlowPass, Teacher
from multirate.methods.hydra.modules import HydraHeads


class HydraObjective(HeadsObjective):
    heads: HydraHeads

    def students(self, teacher: Teacher, slow: SlowPass, before: RowsBefore) -> list[Tensor]:
        inputs = _inputs(self.heads, teacher, slow, before)
        return [self.heads.student(k, z) for k, z in enumerate(inputs, start=1)]


def _inputs(
    heads: HydraHeads, teacher: Teacher, slow: SlowPass, before: RowsBefore
) -> Iterator[Tensor]:
    """What heads 1, 2, … read for each taught row: z [N, (k + 1) · d]."""
    embedded, final = slow.residual[0].float(), slow.final.float()
    read = teacher.norm(heads.prefix(final)[0])
    for k in range(1, heads.config.heads + 1):
        z = before(read, k)
        for back in range(k - 1, -1, -1):  # the tokens up to the taught row's own
            z = heads.joined(z, before(embedded, back))
        yield z


@torch.no_grad()
def start_from_least_squares(
    teacher: Teacher, heads: HydraHeads, batches: Iterable[tuple[Tensor, Tensor, Any]]
) -> None:
    """R_k starts as the linear map that best tells the taught row's normed h_L from what head k
    reads, over the rows of ``batches`` of (ids, mask, known). [ours]
    """
    count, d = heads.config.heads, teacher.shape.hidden_size
    fits = [LeastSquares((k + 1) * d, d) for k in range(1, count + 1)]
    for ids, mask, known in enough(batches, (count + 1) * d):
        slow = teacher.slow(ids, shared=0, known=known)
        rows, before = taught_rows(mask, count)
        taught = slow.normed[rows].float()
        for fit, z in zip(fits, _inputs(heads, teacher, slow, before), strict=True):
            fit.add(z, taught - z[:, :d])
    head: Any
    for head, fit in zip(heads.heads, fits, strict=True):
        head.residual.weight.copy_(fit.solution().T)
