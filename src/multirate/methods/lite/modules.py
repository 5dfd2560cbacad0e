"""LITE's exits beside a frozen base [ours: the paper tunes the base itself through its own head].

    p_E = M_E · h_E / rms(h_E);   token = head(final_norm(p_E))

M_E starts as the identity, which is the base's plain exit.
"""

from __future__ import annotations

from torch import Tensor, nn

from multirate.methods.common.least_squares import direction
from multirate.methods.common.multi_exit import ExitMaps
from multirate.methods.common.reduced_head import first_tokens
from multirate.methods.common.shape import BaseShape
from multirate.methods.lite.config import LiteConfig

EPS = 1e-6


class LinearExits(ExitMaps):
    """See the module's docstring."""

    def __init__(self, config: LiteConfig, base: BaseShape) -> None:
        super().__init__()
        config.check_base(base)
        self.config, self.exits = config, config.exits
        size = base.hidden_size
        self.maps = nn.ModuleDict(
            {str(exit): nn.Linear(size, size, bias=False) for exit in config.exits}
        )
        for exit in config.exits:
            nn.init.eye_(self.map(exit).weight)
        self.register_buffer("draft_tokens", first_tokens(config.draft_vocab))

    def map(self, exit: int) -> nn.Linear:
        """M of an exit."""
        linear = self.maps[str(exit)]
        assert isinstance(linear, nn.Linear)
        return linear

    def forward(self, exit: int, hidden: Tensor) -> Tensor:
        """See ExitMaps."""
        linear = self.map(exit)
        read = direction(hidden.float(), EPS)
        out: Tensor = linear(read.to(linear.weight.dtype)).float()
        return out
