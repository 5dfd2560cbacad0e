"""EAGLE-3's configuration (arXiv 2503.01840)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

from multirate.methods._shared.branch_config import BranchDecodeConfig
from multirate.methods._shared.feature_config import FeatureConfig
from multirate.methods._shared.shape import BaseShape

TAPS = 3


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(FeatureConfig):
    """The draft layer, and which hidden states of the base model it reads."""

    METHOD: ClassVar[str] = "eagle3"

    FROM_BASE: ClassVar[dict[str, str]] = {
        **FeatureConfig.FROM_BASE,
        **dict.fromkeys(
            ("heads", "kv_heads", "head_dim", "intermediate", "norm_eps", "rope_theta"),
            "the model's",
        ),
        "taps": "2, L/2 and L − 3 (the paper's); 0, L/2 and L in models under 10 layers",
    }

    heads: int
    """Query heads of the layer."""
    kv_heads: int
    """Its key/value heads; a divisor of heads."""
    head_dim: int
    """Width of a head; even."""
    intermediate: int
    """Width of its MLP."""
    norm_eps: float = 1e-5
    """Epsilon of its RMS norms."""
    rope_theta: float = 10000.0
    """Base of its rotary embedding."""
    taps: tuple[int, ...] = ()
    """Three layers whose input residuals are read."""
    norm_before_residual: bool = False
    """Whether the residual path also starts from the normed feature, as in some published
    checkpoints.
    """

    def check(self) -> None:
        super().check()
        self.require_count("heads", "kv_heads", "head_dim", "intermediate")
        self.require(self.heads % self.kv_heads == 0, "kv_heads", "a divisor of heads")
        self.require(self.head_dim % 2 == 0, "head_dim", "an even number (rotary pairs)")
        self.require(0 < self.norm_eps <= 1, "norm_eps", "above 0, at most 1")
        self.require(0 < self.rope_theta <= 1e15, "rope_theta", "above 0, at most 1e15")
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

    def layer_shape(self, base: BaseShape) -> BaseShape:
        return replace(
            base,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            norm_eps=self.norm_eps,
            rope_theta=self.rope_theta,
        )

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        """The paper's taps where the base is deep enough, and 3 draft steps in training (the paper:
        7).
        """
        count = base.num_layers
        taps = (2, count // 2, count - 3) if count >= 10 else (0, count // 2, count)
        return super().defaults(base) | {
            "heads": base.num_heads,
            "kv_heads": base.num_kv_heads,
            "head_dim": base.head_dim,
            "intermediate": base.whole_tiles,
            "norm_eps": base.norm_eps,
            "rope_theta": base.rope_theta,
            "taps": taps,
            "unroll_steps": 3,
        }


@dataclass(frozen=True)
class Eagle3DecodeConfig(BranchDecodeConfig):
    METHOD: ClassVar[str] = "eagle3"
