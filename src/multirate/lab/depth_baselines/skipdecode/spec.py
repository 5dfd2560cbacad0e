"""SkipDecode as a depth policy, in which the position alone decides, and its registration."""

from __future__ import annotations

from collections.abc import Sequence

from multirate.decoding.depth import DepthPolicy, LayerRange
from multirate.decoding.dynamic_depth import DynamicDepthStep
from multirate.decoding.session import Session
from multirate.lab.depth_baselines._shared.exits import register_exits
from multirate.lab.depth_baselines.skipdecode.config import SkipDecodeConfig
from multirate.methods.spec import DynamicMode


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
