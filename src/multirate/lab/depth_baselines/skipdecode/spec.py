"""SkipDecode as a depth policy, in which the position alone decides, and its registration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from multirate.decoding.depth import DepthPolicy, LayerRange
from multirate.decoding.dynamic_depth import DynamicDepthStep
from multirate.decoding.session import Session
from multirate.lab.depth_baselines._shared.exits import register_exits
from multirate.methods._shared.config import MethodConfig
from multirate.methods.spec import DynamicMode


@dataclass(frozen=True)
class SkipDecodeConfig(MethodConfig):
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


class PositionSchedule(DepthPolicy):
    """Every row of a step runs the same layers, fewer as the text goes on.

    A token that skips a layer leaves no K/V there, and none are missed: no later one runs it.
    """

    def __init__(self, num_layers: int, config: SkipDecodeConfig) -> None:
        config.warmup_of(num_layers)
        self._layers, self._config = num_layers, config
        self._depth, self._expected = num_layers, 1

    def begin(self, session: Session) -> None:
        self._depth = self._layers
        rooms = [session.stops.total_room(b) for b in session.active]
        self._expected = max(rooms, default=1)

    def schedule(self, session: Session, seqs: Sequence[int]) -> Sequence[LayerRange]:
        # the furthest of the batch; it may end before the others do, and the depth stays
        position = max(len(session.stops.new_tokens[b]) for b in seqs)
        depth = self._config.depth(self._layers, position / self._expected)
        self._depth = min(self._depth, depth)
        return self._config.layers(self._layers, self._depth)


SPEC = register_exits(
    name="skipdecode",
    title="SkipDecode (arXiv 2307.02628, no training)",
    summary="runs fewer layers the longer the text gets, the same for all rows of a batch (lossy)",
    settings=SkipDecodeConfig,
    step=lambda decoder, module, settings: DynamicDepthStep(
        PositionSchedule(decoder.info.num_layers, settings), "none"
    ),
    dynamic=DynamicMode(
        gates=lambda module: (),
        settings=lambda module, least: {"min_share": 1.0 if least is None else least},
        path=(0.97, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5),
    ),
)
