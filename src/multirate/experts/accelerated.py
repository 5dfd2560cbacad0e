"""The accelerated residual as predictor: layer i names the experts of layer i + δ through that layer's own router."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multirate.experts.loader import Prediction
from multirate.experts.predictors import NextLayerGate, Predictor, SelectExperts, likeliest
from multirate.model.native.foresight import NativeForesight, NativeStream

Advance = Callable[[int, Tensor, "Tensor | None", int, "tuple[Tensor, Tensor] | None"], list[Tensor]]
"""(layer, residual [N, d], accelerated state or None, depths, routing) → p of each depth, [N, d] (modules.py)."""


class AcceleratedResidual(Predictor):
    """advance: moves the accelerated residual on by a layer; layers[row]: the model layer of each row; select[row]: its
    norm, router and rule; most_depth: the depths that were trained; native: what advance calls, where it is the kernel.

    The accelerated state lives for one pass over the layers.
    """

    def __init__(
        self, advance: Advance, layers: Sequence[int], select: Sequence[SelectExperts], most_depth: int,
        native: NativeForesight | None = None,
    ) -> None:
        self._advance, self.layers, self._select = advance, list(layers), list(select)
        self.native = native
        self.most_depth = most_depth
        self._state: Tensor | None = None
        self._routing: tuple[Tensor, Tensor] | None = None

    def began(self, rows: int) -> None:
        self._state = None

    def routed(self, experts: Tensor, weights: Tensor) -> None:
        self._routing = experts, weights

    @torch.no_grad()
    def predict(self, row: int, residual: Tensor) -> list[Prediction]:
        if self._state is not None and self._state.shape != residual.shape:
            self._state = None
        depth = min(self.depth, len(self._select) - 1 - row)
        if depth < 1:  # the last layer names nothing, and its state ends with the pass
            return []
        found = self._advance(self.layers[row], residual, self._state, depth, self._routing)
        self._state = found[0]
        return [
            one for step, seen in enumerate(found, start=1)
            for one in likeliest(self._select[row + step](seen), row + step)
        ]  # fmt: skip


class AcceleratedStream(NextLayerGate):
    """The accelerated residual that runs the later layers' attention, in the kernel's own passes. Where Python leads a
    pass from layer to layer, nothing can run ahead of it, and the next layers' routers are asked as they are.
    """

    def __init__(self, native: NativeStream, layers: Sequence[int], select: Sequence[SelectExperts]) -> None:
        super().__init__(select)
        self.native, self.layers = native, list(layers)
        self.most_depth = min(native.most_depth, self.most_depth)
