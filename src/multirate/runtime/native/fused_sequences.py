"""The fused steps of several sequences: which are whose, and which are free for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from multirate.errors import UserError
from multirate.runtime.fused import (
    ChoosePath,
    ConfidenceCounts,
    DraftedNodes,
    DraftShape,
    FusedSequences,
    FusedStep,
    Growth,
    Lookups,
    TextRates,
    TokenChooser,
    UnreadTokens,
)
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.native import abi, library
from multirate.runtime.native.cache import NativeKVCache
from multirate.runtime.native.draft_head import DraftHead
from multirate.runtime.native.fused_steps import FusedSteps, catch_up
from multirate.runtime.native.own_layer import OwnLayer
from multirate.runtime.noise import NOT_FINITE

if TYPE_CHECKING:
    from multirate.runtime.native.decoder import NativeDecoder

_MEASURED_AFTER = 40  # tokens before the drafts that are timed


class NativeFusedSequences(FusedSequences):
    """See FusedSequences. stream, head, layer: what drafts; without a head the text is looked up,
    and nothing else. own_cache: gives the layer's K/V of the generation. trust: of
    `shape.unverified`.
    """

    def __init__(
        self,
        decoder: NativeDecoder,
        stream: abi.CData,
        head: DraftHead | None,
        layer: OwnLayer | None,
        shape: DraftShape,
        lookups: Lookups,
        own_cache: Callable[[], NativeKVCache | None] = lambda: None,
        trust: abi.CData | None = None,
    ) -> None:
        self._decoder, self._layer, self._own_cache = decoder, layer, own_cache
        self._made_of = stream, head, shape, lookups
        self._trust = trust
        self._free: list[FusedSteps] = []  # kept for later generations
        self._entered: dict[int, FusedSteps] = {}

    def _take_free(self) -> FusedSteps:
        """Those of no sequence yet."""
        if self._free:
            return self._free.pop()
        window = None if self._layer is None else self._layer.window
        return FusedSteps(self._decoder, *self._made_of, window=window, trust=self._trust)

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

    def run(self, seqs: Sequence[int], growths: Sequence[Growth]) -> list[FusedStep]:
        every = [self._entered[seq] for seq in seqs]
        return [every[0].run(growths[0])] if len(every) == 1 else _together(every, growths)

    def nodes(self, seq: int) -> DraftedNodes:
        return self._entered[seq].nodes()

    def look_up(self, seq: int, most: int) -> tuple[list[int], int]:
        return self._entered[seq].look_up(most)

    def behind(self, seq: int) -> int:
        return self._entered[seq].behind

    def unread(self, seq: int) -> UnreadTokens:
        return self._entered[seq].unread

    @property
    def refused(self) -> float:  # type: ignore[override]
        return max((steps.refused for steps in self._entered.values()), default=-np.inf)

    def draft_costs(self, rates: TextRates) -> tuple[float, float]:
        steps = self._take_free()
        steps.learn_from(rates)
        cache = self._decoder.new_cache(1, _MEASURED_AFTER + steps.slots)
        cache.commit(0, _MEASURED_AFTER)
        own = None if self._layer is None else self._layer.new_cache(1, cache.capacity)
        found = steps.draft_costs(cache, own)
        self._free.append(steps)
        return found


def _together(every: Sequence[FusedSteps], growths: Sequence[Growth]) -> list[FusedStep]:
    """A level of all drafts is one pass, and so is their verification."""
    # for the kernel: those whose stream drafts come first
    order = sorted(range(len(every)), key=lambda i: not growths[i].stream)
    those = [every[i] for i in order]
    for one in those:
        one.grow_caches()
    lengths, first = zip(*(every[i].prepare(growths[i]) for i in order), strict=True)
    catch_up(those)
    steps = abi.ffi.new("SpeculativeStep *[]", [one.step for one in those])
    limits = abi.ffi.new("DraftLimits *[]", [one.limits for one in those])
    emitted = np.empty(len(those), np.int32)
    entering = [one.entered - begin for one, begin in zip(those, first, strict=True)]
    arrays = [np.array(numbers, np.int32) for numbers in (lengths, first, entering)]
    finite = library.kernel().mr_speculative_steps(
        those[0].decoder.workspace.address,
        steps,
        len(those),
        *map(abi.ints, arrays),
        limits,
        abi.ints(emitted),
    )
    if not finite:
        raise UserError(NOT_FINITE)
    done = dict(
        zip(
            order,
            (one.ended(n) for one, n in zip(those, emitted.tolist(), strict=True)),
            strict=True,
        )
    )
    return [done[i] for i in range(len(every))]
