"""Settings of early-exit self-speculation without training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multirate.errors import UserError
from multirate.methods._shared.config import MethodConfig


@dataclass(frozen=True)
class LayerSkipConfig(MethodConfig):
    """Decoding settings."""

    METHOD: ClassVar[str] = "layerskip"

    exit_layer: int = 0
    """The number of first layers that draft. 0: a quarter of the model's layers, at least one."""
    tokens: int = 6
    """Maximum length of a draft."""
    confidence: float = 0.4
    """Drafting stops before a token whose top-1 probability at the exit is below this; 0 never
    stops.
    """

    def check(self) -> None:
        super().check()
        for name, least in (("exit_layer", 0), ("tokens", 1)):
            accepted = f"a whole number of at least {least}"
            self.require(getattr(self, name) >= least, name, accepted)
        self.require(0 <= self.confidence <= 1, "confidence", "a number from 0 to 1")

    def exit_of(self, num_layers: int) -> int:
        """The exit layer in a model of `num_layers`. Raises UserError if no deeper layer is left to
        verify with.
        """
        exit_layer = self.exit_layer or max(1, num_layers // 4)
        if exit_layer >= num_layers:
            raise UserError(
                f"layerskip's exit_layer is {exit_layer}; accepted for this model: "
                f"1..{num_layers - 1}"
            )
        return exit_layer
