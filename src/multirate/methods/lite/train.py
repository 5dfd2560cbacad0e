"""LITE's objective."""

from __future__ import annotations

from multirate.methods.common.multi_exit import MultiExitObjective
from multirate.methods.common.teacher import Teacher
from multirate.methods.lite.modules import LiteExits


class LiteObjective(MultiExitObjective):
    """Every exit towards the full model's distribution, each weighed alike (the paper:
    cross-entropy with the text, at the exits and the last layer).
    """

    def __init__(self, teacher: Teacher, exits: LiteExits, step_decay: float = 0.8) -> None:
        del step_decay  # one step only
        super().__init__(teacher, exits, "equal")
