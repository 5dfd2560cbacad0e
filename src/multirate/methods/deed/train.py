"""DEED's objective: deep supervision of every exit."""

from __future__ import annotations

from multirate.methods.common.multi_exit import MultiExitObjective
from multirate.methods.common.teacher import Teacher
from multirate.methods.deed.modules import AdaptedExits


class DeedObjective(MultiExitObjective):
    """Every exit towards the full model's distribution, weighed by its depth (the paper:
    cross-entropy with the text at every layer, the base tuned with it).
    """

    def __init__(self, teacher: Teacher, exits: AdaptedExits, step_decay: float = 0.8) -> None:
        del step_decay  # one step only
        super().__init__(teacher, exits, "by_depth")
