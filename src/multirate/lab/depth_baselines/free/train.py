"""FREE's objective."""

from __future__ import annotations

from torch import Tensor

from multirate.lab.depth_baselines._shared.multi_exit import MultiExitObjective
from multirate.methods._shared.least_squares import direction


class FreeObjective(MultiExitObjective):
    """KL to the full model's distribution, and layer distillation: the squared distance of what the
    exit's map gives and of h_L, both at a mean square of one (the paper: cross-entropy with the
    text, and the squared distance of each shallow layer from the deep one it is mapped to).
    """

    def beside(self, said: Tensor, final: Tensor) -> Tensor:
        wanted = direction(final.float())
        return (direction(said, 1e-6) - wanted).square().mean()
