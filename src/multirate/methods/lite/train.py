"""LITE's objective, and where its maps start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from multirate.methods.common.least_squares import LeastSquares, direction
from multirate.methods.common.multi_exit import MultiExitObjective
from multirate.methods.common.teacher import Teacher
from multirate.methods.lite.modules import EPS, LinearExits


class LiteObjective(MultiExitObjective):
    """Every exit towards the full model's distribution, each weighed alike (the paper:
    cross-entropy with the text, at the exits and the last layer).
    """

    def __init__(self, teacher: Teacher, exits: LinearExits, step_decay: float = 0.8) -> None:
        del step_decay  # one step only
        super().__init__(teacher, exits, "equal")


@torch.no_grad()
def start_from_least_squares(
    teacher: Teacher, exits: LinearExits, batches: Iterable[tuple[Tensor, Tensor, Any]]
) -> None:
    """Every map starts as the one that best tells the direction of h_L, over the response rows of
    ``batches`` of (ids, mask, known). [ours]
    """
    d = teacher.shape.hidden_size
    fits = {exit: LeastSquares(d, d) for exit in exits.exits}
    for ids, mask, known in batches:
        slow = teacher.slow(ids, shared=0, gates=exits.exits, known=known)
        wanted = direction(slow.final.float()[mask])
        for exit, fit in fits.items():
            fit.add(direction(slow.residual[exit].float()[mask], EPS), wanted)
    for exit, fit in fits.items():
        exits.map(exit).weight.copy_(fit.solution().T)
