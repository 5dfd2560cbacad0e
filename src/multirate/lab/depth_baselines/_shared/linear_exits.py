"""Exits of one linear map each beside a frozen base.

    p_E = M_E · h_E / rms(h_E);   token = head(final_norm(p_E))

M_E is the identity before training, which is the base's plain exit; training starts it from least
squares. [ours]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from multirate.lab.depth_baselines._shared.exits import ExitsConfig
from multirate.lab.depth_baselines._shared.multi_exit import ExitMaps
from multirate.methods._shared.least_squares import LeastSquares, direction, enough
from multirate.methods._shared.shape import BaseShape
from multirate.methods._shared.teacher import Teacher
from multirate.runtime.native import NativeDecoder
from multirate.runtime.native.packing import Owner

EPS = 1e-6


class LinearExits(ExitMaps):
    def __init__(self, config: ExitsConfig, base: BaseShape) -> None:
        super().__init__(config, base)
        size = base.hidden_size
        self.maps = nn.ModuleDict(
            {str(exit): nn.Linear(size, size, bias=False) for exit in config.exits}
        )
        for exit in config.exits:
            nn.init.eye_(self.map(exit).weight)

    def forward(self, exit: int, hidden: Tensor) -> Tensor:
        linear = self.map(exit)
        read = direction(hidden.float(), EPS)
        out: Tensor = linear(read.to(linear.weight.dtype)).float()
        return out

    def packed(self, decoder: NativeDecoder) -> Callable[[int, Tensor], Tensor]:
        owner, size = Owner(), decoder.info.hidden_size
        packed = {exit: owner.linear(self.map(exit).weight) for exit in self.exits}
        ones = owner.floats(torch.ones(size, dtype=torch.float32, device="cpu"))

        def run(exit: int, hidden: Tensor, owner: Owner = owner) -> Tensor:
            return decoder.product(packed[exit], hidden, ones, eps=EPS)[:, :size]

        return run


@torch.no_grad()
def start_from_least_squares(
    teacher: Teacher, exits: LinearExits, batches: Iterable[tuple[Tensor, Tensor, Any]]
) -> None:
    """Initialises every map by least squares: the linear map that best predicts the direction of
    h_L, over the response rows of ``batches`` of (ids, mask, known). [ours]
    """
    d = teacher.shape.hidden_size
    fits = {exit: LeastSquares(d, d) for exit in exits.exits}
    for ids, mask, known in enough(batches, d):
        slow = teacher.slow(ids, shared=0, gates=exits.exits, known=known)
        wanted = direction(slow.final.float()[mask])
        for exit, fit in fits.items():
            fit.add(direction(slow.residual[exit].float()[mask], EPS), wanted)
    for exit, fit in fits.items():
        exits.map(exit).weight.copy_(fit.solution().T)
