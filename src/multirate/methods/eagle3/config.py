"""EAGLE-3's configuration (arXiv 2503.01840)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from multirate.methods._shared.feature_config import FeatureConfig
from multirate.methods._shared.shape import BaseShape
from multirate.methods._shared.stream_config import StreamDecodeConfig

TAPS = 3


@dataclass(frozen=True)
class Eagle3Config(FeatureConfig):
    """The draft layer, and which hidden states of the base model it reads."""

    METHOD: ClassVar[str] = "eagle3"

    FROM_BASE: ClassVar[dict[str, str]] = {
        **FeatureConfig.FROM_BASE,
        "taps": "2, L/2 and L − 3 (the paper's); 0, L/2 and L in models under 10 layers",
    }

    taps: tuple[int, ...] = ()
    """Three layers whose input residuals are read."""
    norm_before_residual: bool = False
    """Whether the residual path also starts from the normed feature, as in some published
    checkpoints.
    """

    def check(self) -> None:
        super().check()
        rising = all(a < b for a, b in pairwise(self.taps))
        self.require(
            len(self.taps) == TAPS and rising and self.taps[0] >= 0,
            "taps",
            f"{TAPS} layers, increasing",
        )

    def check_base(self, base: BaseShape) -> None:
        super().check_base(base)
        self.require(
            self.taps[-1] <= base.num_layers,
            "taps",
            f"at most the base model's {base.num_layers} layers",
        )

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        """The paper's taps where the base is deep enough, and 3 draft steps in training (the paper:
        7).
        """
        count = base.num_layers
        taps = (2, count // 2, count - 3) if count >= 10 else (0, count // 2, count)
        return super().defaults(base) | {"taps": taps, "unroll_steps": 3}


@dataclass(frozen=True)
class Eagle3DecodeConfig(StreamDecodeConfig):
    METHOD: ClassVar[str] = "eagle3"
