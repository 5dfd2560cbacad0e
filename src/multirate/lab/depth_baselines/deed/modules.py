"""DEED's adaptation modules before the shared head [their form is ours].

    n_E = h_E / rms(h_E);   p_E = n_E + U_E · silu(D_E n_E);   token = head(final_norm(p_E))

U_E starts at zero: an untrained adapter is the base's plain exit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from multirate.lab.depth_baselines._shared.exits import (
    ExitsConfig,
    ThresholdConfig,
    spaced_exits,
)
from multirate.lab.depth_baselines._shared.multi_exit import ExitMaps
from multirate.methods._shared.least_squares import direction
from multirate.methods._shared.shape import BaseShape
from multirate.runtime.native import NativeDecoder
from multirate.runtime.native.packing import Owner


@dataclass(frozen=True)
class DeedConfig(ExitsConfig):
    """An adapter before the base's head at each exit; also see ExitsConfig."""

    METHOD: ClassVar[str] = "deed"
    FROM_BASE: ClassVar[dict[str, str]] = {"exits": "six, from L/4 on (the paper: every layer)"}

    rank: int = 128
    """Width of an adapter."""

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        """Six exits from a quarter of the base's layers on, as in lite (the paper: every layer)."""
        return {"exits": spaced_exits(base.num_layers, 6, 1 / 4)}


@dataclass(frozen=True)
class DeedDecodeConfig(ThresholdConfig):
    """Decoding settings; probabilities are those of the likeliest token."""

    METHOD: ClassVar[str] = "deed"


EPS = 1e-6


class ExitAdapter(nn.Module):
    """n + U · silu(D n)."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(size, rank, bias=False)
        self.up = nn.Linear(rank, size, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, normed: Tensor) -> Tensor:
        added: Tensor = self.up(F.silu(self.down(normed.to(self.down.weight.dtype))))
        return normed + added.float()


class AdaptedExits(ExitMaps):
    def __init__(self, config: DeedConfig, base: BaseShape) -> None:
        super().__init__(config, base)
        self.maps = nn.ModuleDict(
            {str(exit): ExitAdapter(base.hidden_size, config.rank) for exit in config.exits}
        )

    def forward(self, exit: int, hidden: Tensor) -> Tensor:
        said: Tensor = self.map(exit)(direction(hidden.float(), EPS))
        return said

    def packed(self, decoder: NativeDecoder) -> Callable[[int, Tensor], Tensor]:
        owner = Owner()
        packed = {
            exit: owner.bottleneck(self.map(exit).down.weight, self.map(exit).up.weight)
            for exit in self.exits
        }

        def run(exit: int, hidden: Tensor, owner: Owner = owner) -> Tensor:
            down, up = packed[exit]
            read = direction(hidden, EPS)
            return decoder.product(up, F.silu(decoder.product(down, read, None)), None, into=read)

        return run
