"""The accelerated residual as predictor: layer i names the experts of layer i + δ through that layer's own router."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multirate.experts.loader import Prediction
from multirate.experts.predictors import Predictor, SelectExperts
from multirate.methods.m2r2_experts.modules import ExpertForecast


class AcceleratedResidual(Predictor):
    """layers[row]: the model layer of each row; select[row]: its norm, router and rule; ahead: the depth δ in use.

    The accelerated state lives for one pass over the layers.
    """

    def __init__(
        self, forecast: ExpertForecast, layers: Sequence[int], select: Sequence[SelectExperts], ahead: int = 1
    ) -> None:
        self._forecast = forecast.float().eval().requires_grad_(False)
        self._layers, self._select, self._ahead = list(layers), list(select), ahead
        self._state: Tensor | None = None

    @torch.no_grad()
    def predict(self, row: int, residual: Tensor) -> list[Prediction]:
        if row == 0 or (self._state is not None and self._state.shape != residual.shape):
            self._state = None
        found = self._forecast.step(self._layers[row], residual.float(), self._state)
        self._state = found[0]
        target = row + self._ahead
        if target >= len(self._select):
            return []
        chosen = torch.unique(self._select[target](found[self._ahead - 1].to(residual.dtype))).tolist()
        return [Prediction((target, expert), target, 1.0) for expert in chosen]
