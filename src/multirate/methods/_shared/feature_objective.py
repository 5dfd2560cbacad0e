"""What the objectives of layers that draft from features share: draft steps and their weights."""

from __future__ import annotations

from torch import Tensor

from multirate.methods._shared.feature_stream import FeatureStream
from multirate.methods._shared.objective import Objective, Term, step_weight
from multirate.methods._shared.teacher import Teacher


class FeatureObjective(Objective):
    """The mean over draft steps s = 1 … unroll_steps, weighted by `step_weight`."""

    has_early_exit = False  # features come from the last layers

    def __init__(self, teacher: Teacher, layer: FeatureStream) -> None:
        super().__init__(teacher)
        self.layer = layer

    @property
    def terms(self) -> list[Term]:
        depth, steps = self._teacher[0].shape.num_layers, self.layer.config.unroll_steps
        return [Term(depth, s, step_weight(s)) for s in range(1, steps + 1)]

    def mean(self, losses: Tensor) -> Tensor:
        """Of the steps' losses [unroll_steps]."""
        loss, weight = self.weighted(losses)
        return loss / weight
