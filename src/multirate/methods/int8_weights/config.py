"""Settings of plain decoding with weights in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

from multirate.methods.common.config import MethodConfig


@dataclass(frozen=True)
class Int8WeightsConfig(MethodConfig):
    """Settings.

    margin: a token whose two likeliest candidates' logits are less than this apart is decided by
    the model's own weights; 0: none is.
    """

    margin: float = 0.0

    def check(self) -> None:
        self.require(self.margin >= 0, "margin", "0 or above (logits)")
