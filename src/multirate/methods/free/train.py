"""FREE's objective."""

from __future__ import annotations

from torch import Tensor

from multirate.methods.common.least_squares import direction
from multirate.methods.common.multi_exit import MultiExitObjective


class FreeObjective(MultiExitObjective):
    """KL to the full model's distribution, and layer distillation: the squared distance of what the
    exit's map gives and of h_L, both at a mean square of one (the paper: cross-entropy with the
    text, and the squared distance of each shallow layer from the deep one it is mapped to).
    """

    def beside(self, said: Tensor, final: Tensor) -> Tensor:
        wanted = direction(final.float())
        return (direction(said, 1e-6) - wanted).square().mean()
