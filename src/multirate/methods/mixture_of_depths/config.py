"""Mixture-of-Depths' configuration (arXiv 2404.02258), and what may be set when decoding."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from multirate.methods.common.config import MethodConfig
from multirate.methods.common.model_weights import DepthDecodeConfig
from multirate.methods.common.shape import BaseShape


@dataclass(frozen=True)
class MixtureOfDepthsConfig(MethodConfig):
    """A router and its causal predictor at each routed block.

    blocks: the layers (counted from 0) that tokens may pass by, rising. capacity: share of a text's
    response tokens that run each of them in training, those of the highest router weights.
    """

    METHOD: ClassVar[str] = "mixture_of_depths"

    blocks: tuple[int, ...]
    capacity: float = 0.75

    def check(self) -> None:
        rising = all(a < b for a, b in pairwise(self.blocks))
        self.require(
            bool(self.blocks) and self.blocks[0] >= 0 and rising,
            "blocks",
            "increasing layer numbers, starting from 0 or more",
        )
        self.require(0 < self.capacity < 1, "capacity", "a number between 0 and 1")

    def check_base(self, base: BaseShape) -> None:
        """Refuse a config that does not fit ``base``."""
        last = base.num_layers - 1
        self.require(self.blocks[-1] <= last, "blocks", f"layers 0 to {last} of this model")

    @staticmethod
    def for_base(base: BaseShape, **options: Any) -> MixtureOfDepthsConfig:
        """Every other block, as in the paper, but for the first tenth: without these a frozen base
        says nothing.
        """
        first = max(1, base.num_layers // 10)
        values = {"blocks": list(range(first, base.num_layers, 2))} | options
        config = MixtureOfDepthsConfig.from_json(values)
        config.check_base(base)
        return config


@dataclass(frozen=True)
class MixtureOfDepthsDecodeConfig(DepthDecodeConfig):
    """Settings.

    threshold: a token passes a routed block by where the predictor's probability that the router
    leaves it out is at least this, from 0 to 1; null: it runs every block.
    """

    METHOD: ClassVar[str] = "mixture_of_depths"

    threshold: float | None = 0.5

    def check(self) -> None:
        super().check()
        self.require_share("threshold")
