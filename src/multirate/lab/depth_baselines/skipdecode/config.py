"""Settings of SkipDecode (arXiv 2307.02628)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from multirate.decoding.depth import LayerRange
from multirate.methods._shared.config import MethodConfig


@dataclass(frozen=True)
class SkipDecodeConfig(MethodConfig):
    """Decoding settings."""

    METHOD: ClassVar[str] = "skipdecode"

    max_share: float = 1.0
    """Share of the layers that the first new token runs."""
    min_share: float = 0.8
    """Share of the layers at the maximum length of the batch. In between the number of layers falls
    linearly.
    """
    warmup_layers: int = 0
    """Layers at the bottom that every token runs; the rest are the top ones, and the layers in
    between are skipped. 0: two fifths of the model's layers. No token runs fewer than warmup_layers
    and one at the top. [the default is ours]
    """

    def check(self) -> None:
        super().check()
        self.require(0 < self.max_share <= 1, "max_share", "above 0, at most 1")
        self.require(
            0 < self.min_share <= self.max_share, "min_share", "above 0, at most max_share"
        )
        self.require_count("warmup_layers", least=0)

    def warmup_of(self, num_layers: int) -> int:
        """Layers at the bottom that every token runs, in a model of `num_layers`. Raises UserError
        if none is left above them.
        """
        self.require(
            self.warmup_layers < num_layers,
            "warmup_layers",
            f"below the model's {num_layers} layers",
        )
        return self.warmup_layers or 2 * num_layers // 5

    def depth(self, num_layers: int, progress: float) -> int:
        """How many of a model's `num_layers` a token runs at progress t / T."""
        share = self.max_share + (self.min_share - self.max_share) * min(1.0, max(0.0, progress))
        # a sum of rounded shares must not cost a layer more than it says
        return max(self.warmup_of(num_layers) + 1, math.ceil(share * num_layers - 1e-9))

    def layers(self, num_layers: int, depth: int) -> list[LayerRange]:
        """The layers of a token of that depth: the warm-up, and the rest at the top."""
        warmup = self.warmup_of(num_layers)
        top = num_layers - (depth - warmup)
        ranges = [(0, num_layers)] if top <= warmup else [(0, warmup), (top, num_layers)]
        return [(start, stop) for start, stop in ranges if start < stop]
