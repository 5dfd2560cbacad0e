"""Reads experts into slots: demands first, then what was predicted, in the order of the layers that will need it.

Two levels of priority. A speculative read gives way to a demand between two chunks and goes on afterwards; a demand for
an expert that is being read ahead of time joins that read; what was predicted for a layer that has passed is dropped.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from multirate.errors import UserError
from multirate.experts.memory import SlotMemory
from multirate.experts.reader import CHUNK
from multirate.experts.slot_cache import Key, Slot, SlotCache, State
from multirate.experts.stats import ExpertStats
from multirate.experts.store import ExpertStore


@dataclass(frozen=True)
class Prediction:
    """An expert that may be needed: `deadline` is the row of the layer that would, chance its probability."""

    key: Key
    deadline: int
    chance: float


@dataclass
class _Load:
    key: Key
    demanded: bool
    deadline: int = 0
    epoch: int = 0
    slot: Slot | None = None
    done: int = 0  # bytes read so far
    running: bool = False  # a thread is reading it
    dropped: bool = False


class ExpertLoader:
    """Owns the reader threads. All state is under the cache's lock; reads themselves run outside it.

    `close` (or leaving the `with`) ends the threads. A failed read raises in the compute that needs its expert, as a
    UserError naming the file; a failed speculative read only counts as an error.
    """

    def __init__(
        self, store: ExpertStore, cache: SlotCache, memory: SlotMemory, stats: ExpertStats, threads: int = 1
    ) -> None:
        self._store, self._cache, self._memory, self.stats = store, cache, memory, stats
        self._demands: deque[_Load] = deque()
        self._ahead: list[tuple[tuple[int, int, float, int], _Load]] = []  # heap: epoch, deadline, −chance, number
        self._loads: dict[Key, _Load] = {}
        self._failed: dict[Key, OSError] = {}
        self._numbers = itertools.count()
        self._closed = False
        self._threads = [threading.Thread(target=self._work, daemon=True, name=f"experts-{i}") for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def demand(self, keys: Sequence[Key]) -> None:
        """These experts are needed now, in this order."""
        with self._cache.lock:
            for key in keys:
                self._failed.pop(key, None)
            self._demand_locked(keys)

    def wait(self, keys: list[Key]) -> Slot:
        """Holds the first of `keys` to be READY (all are demanded). Raises UserError when its read failed."""
        cache = self._cache
        with cache.lock:
            while True:
                for key in keys:
                    if (slot := cache.hold_locked(key)) is not None:
                        return slot
                    if (error := self._failed.pop(key, None)) is not None:
                        row, expert = key
                        raise UserError(
                            f"expert {expert} of layer {self._store.index.layers[row]} could not be read from "
                            f"{self._store.path}: {error.strerror or error}"
                        ) from error
                if self._closed:
                    raise UserError("the expert loader was closed while an expert was needed")
                self._demand_locked(keys)
                cache.ready.wait()

    def speculate(self, predictions: Sequence[Prediction]) -> None:
        """These experts may be needed; ones that are there or asked for already are left alone. What was predicted for
        the same layers before and is not named again is dropped, unless its read has begun."""
        with self._cache.lock:
            named, rows = {one.key for one in predictions}, {one.deadline for one in predictions}
            for load in self._loads.values():
                if not load.demanded and load.slot is None and load.deadline in rows:
                    load.dropped = load.key not in named
            before = self.stats.issued
            for one in predictions:
                if self._cache.find_locked(one.key) is None and one.key not in self._loads:
                    load = _Load(one.key, False, one.deadline, self._cache.token)
                    self._loads[one.key] = load
                    order = (load.epoch, one.deadline, -one.chance, next(self._numbers))
                    heapq.heappush(self._ahead, (order, load))
                    self.stats.issued += 1
            if self.stats.issued > before:
                self._cache.work.notify_all()

    def pass_row(self, token: int, row: int) -> None:
        """Layer `row` of `token` begins: what was predicted for earlier ones is dropped unless it is demanded."""
        with self._cache.lock:
            self._cache.token, self._cache.row = token, row
            for load in self._loads.values():
                if not load.demanded and (load.epoch, load.deadline) < (token, row):
                    load.dropped = True

    def close(self) -> None:
        """Ends the threads; queued reads are forgotten."""
        with self._cache.lock:
            self._closed = True
            self._cache.work.notify_all()
            self._cache.ready.notify_all()
        for thread in self._threads:
            thread.join()
        self._memory.close()

    def __enter__(self) -> ExpertLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- under the lock -------------------------------------------------------------------------------

    def _demand_locked(self, keys: Iterable[Key]) -> None:
        queued = len(self._demands)
        for key in keys:
            slot = self._cache.find_locked(key)
            if slot is not None and slot.state is State.READY:
                continue
            load = self._loads.get(key)
            if load is None:
                load = self._loads[key] = _Load(key, True)
                self._demands.append(load)
            elif not load.demanded:
                load.demanded, load.dropped = True, False
                self.stats.late += 1
                if not load.running:  # else its thread goes on to the end
                    self._demands.append(load)  # its place in the heap is skipped when it comes up
        if len(self._demands) > queued:
            self._cache.work.notify_all()

    def _next_locked(self) -> _Load | None:
        """The load to go on with, its slot reserved; None when there is nothing to do now."""
        while self._demands:
            load = self._demands[0]
            if self._loads.get(load.key) is not load:  # finished in the meantime
                self._demands.popleft()
                continue
            if load.slot is None:
                load.slot = self._reserve_for_demand_locked(load.key)
                self._cache.starved = load.slot is None
                if load.slot is None:
                    return None  # every slot is held or being filled: a release wakes us
            self._demands.popleft()
            load.running = True
            return load
        while self._ahead:
            load = self._ahead[0][1]
            if load.demanded or self._loads.get(load.key) is not load:
                heapq.heappop(self._ahead)
                continue
            if load.dropped:
                heapq.heappop(self._ahead)
                self._forget_locked(load)
                continue
            if load.slot is None:
                load.slot = self._cache.reserve_locked(load.key, speculative=True)
            heapq.heappop(self._ahead)
            if load.slot is None:  # no room that this token does not use: the prediction is given up
                self._forget_locked(load)
                continue
            load.running = True
            return load
        return None

    def _reserve_for_demand_locked(self, key: Key) -> Slot | None:
        slot = self._cache.reserve_locked(key, speculative=False)
        while slot is None:
            paused = next((x for x in self._loads.values() if x.slot and not x.running and not x.demanded), None)
            if paused is None:
                return None
            self._forget_locked(paused)  # a half-read prediction must not keep a demand waiting
            slot = self._cache.reserve_locked(key, speculative=False)
        return slot

    def _forget_locked(self, load: _Load) -> None:
        self._loads.pop(load.key, None)
        self.stats.cancelled += 1
        if load.slot is not None:
            self._cache.abandon_locked(load.slot)
            load.slot = None

    # -- the threads ----------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._cache.lock:
                while (load := self._next_locked()) is None:
                    if self._closed:
                        return
                    self._cache.work.wait()
            self._read(load)
            if self._closed:
                return

    def _read(self, load: _Load) -> None:
        slot, size = load.slot, self._store.index.record.bytes
        assert slot is not None
        offset = self._store.offset(*load.key)
        began = time.perf_counter()
        try:
            while load.done < size:
                end, since = min(load.done + CHUNK, size), time.perf_counter()
                self._memory.fill(slot.index, offset, load.done, end)
                demanded = load.demanded
                with self._cache.lock:
                    self._count_locked(end - load.done, demanded, time.perf_counter() - since)
                    load.done = end
                    if end < size and not load.demanded:
                        if load.dropped or self._closed:
                            self._forget_locked(load)
                            return
                        if self._demands:  # gives way; goes on from here later
                            order = (load.epoch, load.deadline, -1.0, next(self._numbers))
                            load.running = False
                            heapq.heappush(self._ahead, (order, load))
                            return
        except OSError as error:
            with self._cache.lock:
                self.stats.errors += 1
                self._loads.pop(load.key, None)
                if load.demanded:
                    self._failed[load.key] = error
                self._cache.abandon_locked(slot)
            return
        with self._cache.lock:
            self.stats.note("demand" if load.demanded else "speculative", began, *load.key)
            self._loads.pop(load.key, None)
            slot.fresh = not load.demanded
            self._cache.loaded_locked(slot)

    def _count_locked(self, size: int, demanded: bool, seconds: float) -> None:
        self.stats.read_seconds += seconds
        if demanded:
            self.stats.demand_bytes += size
        else:
            self.stats.speculative_bytes += size
