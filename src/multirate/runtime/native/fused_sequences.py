"""The fused steps of all sequences of a generation: one `FusedSteps` each, which run together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from multirate.runtime.fused import (
    ChoosePath,
    ConfidenceCounts,
    DraftedNodes,
    DraftShape,
    FusedSequences,
    FusedStep,
    Growth,
    Lookups,
    PendingTokens,
    TextRates,
    TokenChooser,
)
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.native import abi
from multirate.runtime.native.cache import NativeKVCache
from multirate.runtime.native.draft_head import DraftHead
from multirate.runtime.native.fused_steps import FusedSteps, run_together
from multirate.runtime.native.own_layer import OwnLayer

if TYPE_CHECKING:
    from multirate.runtime.native.decoder import NativeDecoder

_MEASURED_AFTER = 40  # tokens before the drafts that are timed
_MEASURED_LEVELS = 6  # of the longer of two measured drafts


class NativeFusedSequences(FusedSequences):
    """See FusedSequences. branch, head, layer: what drafts; without a head the text is looked up,
    and nothing else. own_cache: gives the layer's K/V of the generation. rule: of
    `shape.unverified`.
    """

    def __init__(
        self,
        decoder: NativeDecoder,
        branch: abi.CData,
        head: DraftHead | None,
        layer: OwnLayer | None,
        shape: DraftShape,
        lookups: Lookups,
        own_cache: Callable[[], NativeKVCache | None] = lambda: None,
        rule: abi.CData | None = None,
    ) -> None:
        self._decoder, self._layer, self._own_cache = decoder, layer, own_cache
        self._made_of = branch, head, shape, lookups
        self._rule = rule
        self._free: list[FusedSteps] = []  # kept for later generations
        self._entered: dict[int, FusedSteps] = {}

    def _take_free(self) -> FusedSteps:
        """Those of no sequence yet."""
        if self._free:
            return self._free.pop()
        window = None if self._layer is None else self._layer.window
        return FusedSteps(self._decoder, *self._made_of, window=window, rule=self._rule)

    def begin(self, cache: KVCache, chooser: TokenChooser, choose_path: ChoosePath) -> None:
        assert isinstance(cache, NativeKVCache)
        self._free += self._entered.values()
        self._entered = {}
        self._generation = cache, self._own_cache(), chooser, choose_path

    def __contains__(self, seq: int) -> bool:
        return seq in self._entered

    def enter(
        self,
        seq: int,
        ids: Sequence[int],
        carried: Tensor | None = None,
        text: Sequence[int] | None = None,
        rates: TextRates | None = None,
        calibration: ConfidenceCounts | None = None,
    ) -> None:
        steps = self._entered[seq] = self._take_free()
        steps.begin(*self._generation)
        steps.enter(seq, ids, carried, text)
        steps.learn_from(rates, calibration)

    def leave(self, seq: int) -> None:
        if seq in self._entered:
            self._free.append(self._entered.pop(seq))

    def settle(self, seq: int) -> None:
        self._entered[seq].settle()

    def run(self, seqs: Sequence[int], growths: Sequence[Growth]) -> list[FusedStep]:
        return run_together([self._entered[seq] for seq in seqs], growths)

    def nodes(self, seq: int) -> DraftedNodes:
        return self._entered[seq].nodes()

    def look_up(self, seq: int, most: int) -> tuple[list[int], int]:
        return self._entered[seq].look_up(most)

    def behind(self, seq: int) -> int:
        return self._entered[seq].behind

    def unread(self, seq: int) -> PendingTokens:
        return self._entered[seq].unread.pending()

    @property
    def highest_rejected(self) -> float:  # type: ignore[override]
        return max((one.step.highest_rejected for one in self._entered.values()), default=-np.inf)

    def draft_costs(self, rates: TextRates) -> tuple[float, float]:
        """Timed on drafts of many levels and of one, over caches of their own (a level alone misses
        that draft and verification push each other out of the processor's caches). At least two
        repeats, however long they take.
        """
        steps = self._take_free()
        steps.learn_from(rates)
        cache = self._decoder.new_cache(1, _MEASURED_AFTER + steps.capacity + 1)
        cache.commit(0, _MEASURED_AFTER)
        steps.begin(
            cache, None if self._layer is None else self._layer.new_cache(1, cache.capacity)
        )
        most = min(steps.capacity, _MEASURED_LEVELS)
        taken: dict[int, list[float]] = {1: [], most: []}
        deadline = time.perf_counter() + 0.2
        for repeat in range(40):
            if repeat >= 2 and time.perf_counter() > deadline:
                break
            for depth in taken:
                steps.enter(0, [0])
                steps.limits.nodes = depth
                taken[depth].append(run_together([steps], [Growth(depth)])[0].draft_seconds)
        steps.limits.nodes = self._made_of[2].nodes
        self._free.append(steps)
        # the least: drafts that look dearer than they are may never be tried, and so never timed;
        # ones that look cheaper are, and the budget policy learns what they take
        one, many = (min(taken[depth][1:]) for depth in (1, most))
        level = max(many - one, 0.0) / max(most - 1, 1)
        return max(one - level, 0.0), level
