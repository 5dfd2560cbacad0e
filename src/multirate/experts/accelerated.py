"""The accelerated residual as predictor: layer i names the experts of layer i + δ through that
layer's own router.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multirate.errors import UserError
from multirate.experts.loader import Prediction
from multirate.experts.predictors import NextLayerGate, Predictor, SelectExperts, likeliest
from multirate.runtime.native.accelerated_residual import (
    NativeAcceleratedResidual,
    NativeResidualWithAttention,
)
from multirate.runtime.native.moe import NativeMoEDecoder

STREAM_ROWS = 16  # as in the kernel (predictors.c)

Advance = Callable[
    [int, Tensor, "Tensor | None", int, "tuple[Tensor, Tensor] | None"], list[Tensor]
]
"""(layer, residual [N, d], accelerated state or None, depths, routing) → p of each depth, [N, d]
(modules.py).
"""


class AcceleratedResidual(Predictor):
    """advance: moves the accelerated residual on by a layer; layers[row]: the model layer of each
    row; select[row]: its norm, router and rule; most_depth: the depths that were trained; native:
    what advance calls, where it is the kernel.

    The accelerated state lives for one pass over the layers.
    """

    def __init__(
        self,
        advance: Advance,
        layers: Sequence[int],
        select: Sequence[SelectExperts],
        most_depth: int,
        native: NativeAcceleratedResidual | None = None,
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
            one
            for step, seen in enumerate(found, start=1)
            for one in likeliest(self._select[row + step](seen), row + step)
        ]


class AcceleratedWithAttention(NextLayerGate):
    """The accelerated residual that runs the later layers' attention over the running pass's keys
    and values.

    Passes with more than STREAM_ROWS rows (prompts, which need most experts anyway) ask the next
    layers' routers as they are. decoder: runs the attention. Raises UserError where transformers'
    own layers run the model
    instead: they cannot run ahead of themselves.
    """

    def __init__(
        self,
        native: NativeResidualWithAttention,
        layers: Sequence[int],
        select: Sequence[SelectExperts],
        decoder: NativeMoEDecoder,
    ) -> None:
        super().__init__(select)
        self.native, self.layers, self._decoder = native, list(layers), decoder
        self.most_depth = min(native.most_depth, self.most_depth)
        self._routing: tuple[Tensor, Tensor] | None = None

    @property
    def can_run(self) -> bool:
        return self._decoder.running is not None

    def routed(self, experts: Tensor, weights: Tensor) -> None:
        self._routing = experts, weights

    @torch.no_grad()
    def predict(self, row: int, residual: Tensor) -> list[Prediction]:
        if not self.can_run:
            raise UserError(
                "expert policy accelerated cannot run this predictor (attention=true) on "
                "transformers' own layers; use "
                "generate(custom_generate=multirate.custom_generate()), or the policy aot or "
                "next_layer_gate"
            )
        if len(residual) > STREAM_ROWS:
            return super().predict(row, residual)
        assert self._routing is not None
        x, routing, found = residual, self._routing, []
        for target in range(row + 1, min(row + self.depth + 1, len(self.layers))):
            x = self.native.leaving(self.layers[target - 1], x, routing)
            self._decoder.run_ahead(x, self.layers[target - 1] + 1, self.layers[target] + 1)
            routing = self._decoder.route(target, x)
            found += likeliest(routing[0], target)
        return found
