"""Loads experts into slots: demands first, then what was predicted, in the order of the layers that
will need it.

All decisions are made on the thread that computes; only the reads themselves are elsewhere
(reads.py). A demand for an expert that is being read ahead of time joins that read; what was
predicted for a layer that has passed, or is not predicted any more, is dropped.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from multirate.errors import UserError
from multirate.experts.expert_cache import ExpertCache, Key, Slot, State
from multirate.experts.reads import Ended, Reads, reason
from multirate.experts.stats import ExpertStats
from multirate.experts.store import ExpertStore

_PATIENCE = 0.1  # seconds between two looks at Ctrl-C while waiting for a read


class Prediction(NamedTuple):
    """An expert that may be needed: `deadline` is the row of the layer that would, chance orders
    those of a layer.
    """

    key: Key
    deadline: int
    chance: float


@dataclass(eq=False)
class _Load:
    key: Key
    slot: Slot
    demanded: bool
    deadline: int = 0
    token: int = 0
    early: bool = False  # predicted before it was demanded


def unreadable(store: ExpertStore, key: Key, why: str) -> UserError:
    """What is raised in the compute that needs an expert whose read failed."""
    row, expert = key
    return UserError(
        f"expert {expert} of layer {store.index.layers[row]} could not be read from {store.path}: "
        f"{why}"
    )


class ExpertLoader:
    """Turns needs and predictions into reads, and finished reads into READY slots.

    `close` (or leaving the `with`) ends the reading threads. A failed read raises a UserError
    naming the file in the computation that needs its expert; a failed speculative read only counts
    as an error.
    """

    def __init__(
        self,
        store: ExpertStore,
        cache: ExpertCache,
        reads: Reads,
        stats: ExpertStats,
        intact: Callable[[Key, int], bool] = lambda key, slot: True,
    ) -> None:
        """intact(key, slot): whether the record that has been read into the slot is what was
        packed.
        """
        self._intact = intact
        self._store, self._cache, self._reads, self.stats = store, cache, reads, stats
        self._loads: dict[Key, _Load] = {}
        self._of_slot: dict[int, _Load] = {}
        self._failed: dict[Key, Ended] = {}
        self._pending: list[Prediction] = []  # without a slot yet
        self._numbers = 0
        self._busy_until = 0.0
        self._closed = False

    def demand(self, keys: Iterable[Key]) -> None:
        """These experts are needed now, in this order."""
        for key in keys:
            load = self._loads.get(key)
            if load is not None:
                if not load.demanded:
                    load.demanded = load.early = True
                    self.stats.late += 1
                    self._reads.promote(load.slot.index)
                continue
            if self._cache.find(key) is not None:
                continue
            slot = self._reserve(key)
            if slot is None:
                return  # every slot is held or being filled: asked again when one is free
            self._submit(_Load(key, slot, True), 0)

    def wait(self, keys: Sequence[Key]) -> Slot:
        """Waits until the first of `keys` is READY (all are requested), and holds it. Raises
        UserError if its read failed.
        """
        while True:
            for key in keys:
                if (slot := self._cache.hold(key)) is not None:
                    return slot
                if (failure := self._failed.pop(key, None)) is not None:
                    raise unreadable(self._store, key, failure.message or reason(failure.error))
            if self._closed:
                raise UserError("the expert loader was closed while an expert was needed")
            self.demand(keys)
            if not self._loads:
                raise RuntimeError(
                    "every slot is held and nothing is being read"
                )  # a defect, never the user's
            self.poll(_PATIENCE)

    def poll(self, patience: float = 0.0) -> None:
        """Takes note of reads that have ended, after waiting up to `patience` seconds for one."""
        if self._loads:
            for one in self._reads.ended(patience):
                self._over(one)

    def prefetch(self, predictions: Sequence[Prediction]) -> None:
        """These experts may be needed; ones that are there or asked for already are left alone.
        What was predicted for the same layers before and is not predicted again is dropped,
        unless its read has begun.
        """
        rows, predicted = {one.deadline for one in predictions}, {one.key for one in predictions}
        self._cache.protected = {
            key for key in self._cache.protected if key[0] not in rows
        } | predicted
        if self._loads or self._pending:
            for load in [x for x in self._loads.values() if not x.demanded and x.deadline in rows]:
                if load.key not in predicted:
                    self._drop(load)
            self._pending = [one for one in self._pending if one.deadline not in rows]
        missing = [one for one in predictions if self._cache.find(one.key) is None]
        if missing:
            self._pending = sorted(
                [*self._pending, *missing], key=lambda one: (one.deadline, -one.chance)
            )
            self.go_on()

    def go_on(self) -> None:
        """Slots may have become free: reads what was predicted and found none. A slot that this
        token has used is not for predictions.
        """
        while self._pending:
            one = self._pending[0]
            if self._cache.find(one.key) is None:
                slot = self._cache.reserve(one.key, speculative=True)
                if slot is None:
                    return
                self._numbers += 1
                self.stats.issued += 1
                order = (
                    self._cache.token * len(self._store.index.layers) + one.deadline << 32
                ) + self._numbers
                self._submit(_Load(one.key, slot, False, one.deadline, self._cache.token), order)
            self._pending.pop(0)

    def pass_row(self, token: int, row: int) -> None:
        """Layer `row` of `token` begins: what was predicted for earlier ones is dropped unless it
        is demanded.
        """
        if token != self._cache.token:
            self._pending = []
            self._cache.protected = set()
        self._pending = [one for one in self._pending if one.deadline > row]
        self._cache.protected = {key for key in self._cache.protected if key[0] > row}
        self._cache.token, self._cache.row = token, row
        if self._loads:
            self.poll()
            for load in [
                x
                for x in self._loads.values()
                if not x.demanded and (x.token, x.deadline) < (token, row)
            ]:
                self._drop(load)

    def forget_failures(self) -> None:
        """A new layer asks: what failed before is tried again."""
        self._failed.clear()

    def close(self) -> None:
        """Ends the threads; queued reads are forgotten."""
        self._closed = True
        self._reads.close()

    def __enter__(self) -> ExpertLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reserve(self, key: Key) -> Slot | None:
        slot = self._cache.reserve(key, speculative=False)
        if slot is None:
            for load in [x for x in self._loads.values() if not x.demanded]:
                if self._drop(load):  # a prediction must not keep a demand waiting
                    return self._cache.reserve(key, speculative=False)
        return slot

    def _submit(self, load: _Load, order: int) -> None:
        self._loads[load.key] = self._of_slot[load.slot.index] = load
        self._reads.submit(load.slot.index, self._store.offset(*load.key), order, load.demanded)

    def _drop(self, load: _Load) -> bool:
        """Whether its slot is free now; a read that has begun is told to end with its chunk."""
        if not self._reads.cancel(load.slot.index):
            return False
        self._forget(load)
        self.stats.cancelled += 1
        return True

    def _forget(self, load: _Load) -> None:
        del self._loads[load.key], self._of_slot[load.slot.index]
        self._cache.abandon(load.slot)

    def _over(self, one: Ended) -> None:
        load = self._of_slot[one.slot]
        if not one.error and not self._intact(load.key, one.slot):
            one.error = errno.EBADMSG
        ahead = load.early or not load.demanded
        if ahead:
            self.stats.speculative_bytes += one.bytes
        else:
            self.stats.demand_bytes += one.bytes
        self.stats.read_seconds += max(
            one.ended - max(one.began, self._busy_until), 0.0
        )  # two at a time count once
        self._busy_until = max(one.ended, self._busy_until)
        if self.stats.events is not None:
            self.stats.record("speculative" if ahead else "demand", one.began, one.ended, *load.key)
        if not one.error:
            assert load.slot.state is State.LOADING
            del self._loads[load.key], self._of_slot[one.slot]
            load.slot.fresh = not load.demanded
            self._cache.loaded(load.slot)
            if load.demanded:
                self._cache.touch(load.slot)
            return
        self._forget(load)
        if one.error == errno.ECANCELED:
            self.stats.cancelled += 1
            return
        self.stats.errors += 1
        if load.demanded:
            self._failed[load.key] = one
