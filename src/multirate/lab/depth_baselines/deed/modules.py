"""DEED's adaptation modules before the shared head [their form is ours].

    n_E = h_E / rms(h_E);   p_E = n_E + U_E · silu(D_E n_E);   token = head(final_norm(p_E))

U_E starts at zero: an untrained adapter is the base's plain exit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from multirate.lab.depth_baselines._shared.multi_exit import ExitMaps
from multirate.lab.depth_baselines.deed.config import DeedConfig
from multirate.methods._shared.least_squares import direction
from multirate.methods._shared.reduced_head import first_tokens
from multirate.methods._shared.shape import BaseShape
from multirate.runtime.native import NativeDecoder
from multirate.runtime.native.packing import Owner

EPS = 1e-6


class ExitAdapter(nn.Module):
    """U · silu(D n)."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(size, rank, bias=False)
        self.up = nn.Linear(rank, size, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, normed: Tensor) -> Tensor:
        out: Tensor = self.up(F.silu(self.down(normed)))
        return out


class AdaptedExits(ExitMaps):
    """See the module's docstring."""

    def __init__(self, config: DeedConfig, base: BaseShape) -> None:
        super().__init__()
        config.check_base(base)
        self.config, self.exits = config, config.exits
        self.adapters = nn.ModuleDict(
            {str(exit): ExitAdapter(base.hidden_size, config.rank) for exit in config.exits}
        )
        self.register_buffer("draft_tokens", first_tokens(config.draft_vocab))

    def adapter(self, exit: int) -> ExitAdapter:
        """That of an exit."""
        adapter = self.adapters[str(exit)]
        assert isinstance(adapter, ExitAdapter)
        return adapter

    def forward(self, exit: int, hidden: Tensor) -> Tensor:
        """See ExitMaps."""
        adapter, read = self.adapter(exit), direction(hidden.float(), EPS)
        return read + adapter(read.to(adapter.down.weight.dtype)).float()

    def packed(self, decoder: NativeDecoder) -> Callable[[int, Tensor], Tensor]:
        """See ExitMaps."""
        owner = Owner()
        packed = {
            exit: owner.bottleneck(self.adapter(exit).down.weight, self.adapter(exit).up.weight)
            for exit in self.exits
        }

        def run(exit: int, hidden: Tensor, owner: Owner = owner) -> Tensor:
            down, up = packed[exit]
            read = direction(hidden, EPS)
            return decoder.product(up, F.silu(decoder.product(down, read, None)), None, into=read)

        return run
