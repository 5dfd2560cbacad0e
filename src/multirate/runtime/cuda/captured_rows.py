"""What drafts compute of a few rows beside the model's own layers, captured as the model's passes
are (decoder.py): a draft's own layer and its head are some ninety kernels, each of which takes
longer to launch than to run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from multirate.errors import say_once
from multirate.runtime.captured import CapturedRows, RowsFunction, StaticSlots
from multirate.runtime.cuda.recorder import MAX_CAPTURES, Replay, width_of
from multirate.runtime.cuda.static_cache import StaticKVCache, StaticStorage, round_up, seen_slots
from multirate.runtime.hf.decoder import relative_difference, rounding_limit
from multirate.runtime.kv_cache import KVCache, LayerKV
from multirate.runtime.rows import Rows

if TYPE_CHECKING:
    from multirate.runtime.cuda.decoder import GraphedDecoder


class GraphedRows(CapturedRows):
    """Functions of `N` rows, [N, ...] each → [N, ...], captured for padded numbers of rows; with
    more than WIDTHS has, they just run.

    The first run of a capture is compared with the function itself. Where it cannot be captured,
    or gives other numbers, functions run as they are from then on: `fallback` says why.
    """

    def __init__(self, decoder: GraphedDecoder) -> None:
        self._decoder = decoder
        self._captures: OrderedDict[Hashable, Any] = OrderedDict()
        self._kept: StaticStorage | None = None
        self.fallback: str | None = None

    def new_cache(self, batch: int, capacity: int, layout: list[LayerKV]) -> KVCache:
        """The storage of the one before, if that is gone, is used again with what was captured over
        it.
        """
        kept = self._kept if self._kept is not None and self._kept.free else None
        cache = StaticKVCache(batch, capacity, layout, kept)
        self._kept = cache.storage
        return cache

    @torch.no_grad()
    def alone(
        self,
        name: Hashable,
        function: RowsFunction,
        *inputs: Tensor,
        judged: Callable[[Tensor], Tensor] = lambda out: out,
    ) -> Tensor:
        width = self._width(len(inputs[0]))
        if width is None:
            return function(*inputs)
        key = (name, width, *((x.dtype, x.shape[1:]) for x in inputs))
        return self._replayed(
            self._captures, key, width, function, inputs, lambda: function(*inputs), judged
        )

    @torch.no_grad()
    def with_cache(
        self, name: Hashable, function: RowsFunction, rows: Rows, cache: KVCache, *inputs: Tensor
    ) -> Tensor:
        width = self._width(len(rows))
        if width is None or not isinstance(cache, StaticKVCache) or cache.batch > 1:
            return function(*inputs, rows, cache)
        cache.note_positions(rows)
        end = int(rows.visible_end().max())
        if end > cache.capacity:
            return function(*inputs, rows, cache)
        self._kept = storage = cache.storage
        span = round_up(max(end, 1))
        # rows behind the last write to the scratch slot, and see slot 0
        numbers = np.zeros((width, 4), np.int64)
        numbers[:, 1], numbers[:, 2] = storage.scratch, 1
        slot = np.where(rows.slot < 0, storage.scratch, rows.slot)
        numbers[: len(rows)] = np.stack([rows.pos, slot, rows.prefix, rows.tree], axis=1)
        keys, values = storage.keys[0], storage.values[0]  # not the storage: it holds captures

        def static(numbers: Tensor, *fixed: Tensor) -> Tensor:
            pos, slot, prefix, tree = numbers.unbind(1)
            seen = seen_slots(prefix, tree, span)
            return function(*fixed, StaticSlots(pos, slot, seen, keys, values), None)

        given = (torch.from_numpy(numbers).to(inputs[0].device), *inputs)
        key = (name, width, span, *((x.dtype, x.shape[1:]) for x in inputs))
        return self._replayed(
            storage.captures, key, width, static, given, lambda: function(*inputs, rows, cache)
        )

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self._decoder.parts.embed(ids, positions)

    def _width(self, rows: int) -> int | None:
        if self.fallback is not None or self._decoder.graph_fallback is not None:
            return None
        return width_of(rows) if rows else None

    def _replayed(
        self,
        captures: OrderedDict[Hashable, Any],
        key: Hashable,
        width: int,
        function: RowsFunction,
        inputs: tuple[Tensor, ...],
        itself: Callable[[], Tensor],
        judged: Callable[[Tensor], Tensor] = lambda out: out,
    ) -> Tensor:
        """itself: what is captured, without padding."""
        rows = len(inputs[-1])
        if key in captures:
            captures.move_to_end(key)
            fixed, replay = captures[key]
            _load(fixed, inputs)
            return _own(replay, rows)
        fixed = [x.new_zeros(width, *x.shape[1:]) for x in inputs]
        _load(fixed, inputs)
        try:
            replay = self._decoder.recorder.capture(lambda: function(*fixed))
            got = judged(_own(replay, rows))
        except RuntimeError as error:
            self._fall_back(f"CUDA graph capture failed ({str(error).splitlines()[0]})")
            return itself()
        out = itself()
        expected = judged(out)
        difference = relative_difference(got, expected)
        if not difference <= rounding_limit(self._decoder.info.dtype):
            self._fall_back(
                f"the CUDA graph gave other numbers (relative difference {difference:.1e})"
            )
            return out
        captures[key] = (fixed, replay)
        if len(captures) > MAX_CAPTURES:
            captures.popitem(last=False)
        return out

    def _fall_back(self, why: str) -> None:
        self.fallback = why
        self._captures.clear()
        say_once(f"running the draft layer kernel by kernel: {why}")


def _load(fixed: list[Tensor], inputs: tuple[Tensor, ...]) -> None:
    for static, x in zip(fixed, inputs, strict=True):
        static[: len(x)] = x
        if len(x) < len(static):
            static[len(x) :] = 0


def _own(replay: Replay, rows: int) -> Tensor:
    """The rows of a replay, in memory of their own: the next one overwrites it."""
    return replay()[:rows].clone()
