"""Configuration of Mixture-of-Depths (arXiv 2404.02258), and decoding settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from multirate.lab.depth_baselines._shared.exits import ThresholdConfig, rises
from multirate.methods._shared.config import MethodConfig
from multirate.methods._shared.shape import BaseShape


@dataclass(frozen=True)
class MixtureOfDepthsConfig(MethodConfig):
    """A router and its causal predictor at each routed block."""

    METHOD: ClassVar[str] = "mixture_of_depths"
    FROM_BASE: ClassVar[dict[str, str]] = {"blocks": "every other one, from L/10 on"}

    blocks: tuple[int, ...]
    """Layers (counted from 0) that tokens may skip, in increasing order."""
    capacity: float = 0.75
    """In training, the share of a text's response tokens that run each block: the ones with the
    highest router weights (the paper: 0.125).
    """

    def check(self) -> None:
        accepted = "increasing layer numbers, starting from 0 or more"
        self.require(rises(self.blocks, 0), "blocks", accepted)
        self.require(0 < self.capacity < 1, "capacity", "a number between 0 and 1")

    def check_base(self, base: BaseShape) -> None:
        last = base.num_layers - 1
        self.require(self.blocks[-1] <= last, "blocks", f"layers 0 to {last} of this model")

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        """Every other block, as in the paper, except in the first tenth of the layers, which a
        frozen base cannot do without.
        """
        return {"blocks": list(range(max(1, base.num_layers // 10), base.num_layers, 2))}


@dataclass(frozen=True)
class MixtureOfDepthsDecodeConfig(ThresholdConfig):
    METHOD: ClassVar[str] = "mixture_of_depths"

    threshold: float | None = 0.5
    """A token skips a routed block if the predictor's probability that the router leaves it out is
    at least this, from 0 to 1. Null: it runs every block.
    """
