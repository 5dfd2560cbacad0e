"""Which expert is evicted. A policy orders the slots; the cache takes the first that may be evicted
(expert_cache.py).
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from multirate.errors import UserError

if TYPE_CHECKING:
    from multirate.experts.expert_cache import Key, Slot


class EvictionPolicy(ABC):
    """Knows the READY slots. keeps: False empties a slot on release."""

    keeps = True

    @abstractmethod
    def on_insert(self, slot: Slot) -> None:
        """It is READY now, and not used yet."""

    @abstractmethod
    def on_access(self, slot: Slot, token: int) -> None:
        """Its expert is about to be computed with, in the `token`-th pass over the layers."""

    @abstractmethod
    def on_evict(self, slot: Slot) -> None:
        """It loses its expert."""

    @abstractmethod
    def order(self, token: int, row: int) -> Iterable[Slot]:
        """The slots, the first to leave first, while layer `row` of pass `token` runs. Nothing else
        is called until the caller has stopped taking from it.
        """


class LeastRecentlyUsed(EvictionPolicy):
    """The one whose last use is longest ago."""

    def __init__(self) -> None:
        self._recent: OrderedDict[int, Slot] = OrderedDict()

    def on_insert(self, slot: Slot) -> None:
        self._recent[slot.index] = slot
        self._recent.move_to_end(slot.index)

    def on_access(self, slot: Slot, token: int) -> None:
        self._recent.move_to_end(slot.index)

    def on_evict(self, slot: Slot) -> None:
        del self._recent[slot.index]

    def order(self, token: int, row: int) -> Iterable[Slot]:
        return self._recent.values()


class KeepNothing(LeastRecentlyUsed):
    """On demand: every use is a read."""

    keeps = False


class LeastStale(EvictionPolicy):
    """What an earlier token left goes first. [our reading of SpecMD's least-stale]

    Layers are visited in a cycle, so of what an earlier token left, the layers already passed in
    this token have had
    their chance: they go first, the oldest first; then the layers ahead, the farthest first. Of
    what this token itself
    used, the last is needed again last: it goes first.
    """

    def __init__(self) -> None:
        self._rows: dict[int, OrderedDict[int, Slot]] = {}  # by row, the oldest use first
        self._when: dict[int, int] = {}  # slot → number of its last use
        self._number = 0

    def on_insert(self, slot: Slot) -> None:
        assert slot.key is not None
        self._number += 1
        self._when[slot.index] = self._number
        row = self._rows.setdefault(slot.key[0], OrderedDict())
        row[slot.index] = slot
        row.move_to_end(slot.index)

    def on_access(self, slot: Slot, token: int) -> None:
        self.on_insert(slot)

    def on_evict(self, slot: Slot) -> None:
        assert slot.key is not None
        del self._rows[slot.key[0]][slot.index], self._when[slot.index]

    def _stale(self, row: int, token: int) -> Iterator[Slot]:
        """What an earlier token left of a row, the oldest first."""
        for slot in self._rows[row].values():
            if slot.token >= token:
                return
            yield slot

    def order(self, token: int, row: int) -> Iterator[Slot]:
        passed = [self._stale(r, token) for r in self._rows if r < row]
        heads = {
            self._when[slot.index]: (slot, rest)
            for rest in passed
            if (slot := next(rest, None)) is not None
        }
        while heads:
            slot, rest = heads.pop(min(heads))
            yield slot
            if (following := next(rest, None)) is not None:
                heads[self._when[following.index]] = (following, rest)
        for r in sorted((r for r in self._rows if r >= row), reverse=True):
            yield from self._stale(r, token)
        current = [
            slot for slots in self._rows.values() for slot in slots.values() if slot.token >= token
        ]
        yield from sorted(current, key=lambda slot: -self._when[slot.index])


class DecayedFrequency(EvictionPolicy):
    """The one with the least uses, each counting `decay` less with every token since: between least
    recently and least frequently used (LRFU, Lee et al. 2001). Of equals the one that was ranked
    longest ago. Ranks outlive a slot's expert.
    """

    def __init__(self, decay: float = 0.97) -> None:
        self.loss = -math.log(decay)
        self._rank: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Slot, Key]] = []  # stale entries stay until they come up
        self._current: dict[int, int] = {}  # slot → number of its one valid entry
        self._number = 0

    def on_insert(self, slot: Slot) -> None:
        assert slot.key is not None
        self._number += 1
        self._current[slot.index] = self._number
        heapq.heappush(
            self._heap, (self._rank.get(slot.key, -math.inf), self._number, slot, slot.key)
        )

    def on_evict(self, slot: Slot) -> None:
        del self._current[slot.index]

    def on_access(self, slot: Slot, token: int) -> None:
        assert slot.key is not None
        self._rank[slot.key] = self.ranked(self._rank.get(slot.key), token)
        self.on_insert(slot)
        if len(self._heap) > 16 * len(self._current) + 64:
            self._heap = [entry for entry in self._heap if self._valid(entry)]
            heapq.heapify(self._heap)

    def ranked(self, before: float | None, token: int) -> float:
        """The rank after a use: ln(score) + loss · token; before: None for the first. All scores
        fade alike, so ranks stand.
        """
        score = 1.0 if before is None else 1.0 + math.exp(before - self.loss * token)
        return math.log(score) + self.loss * token

    def _valid(self, entry: tuple[float, int, Slot, Key]) -> bool:
        return self._current.get(entry[2].index) == entry[1]

    def order(self, token: int, row: int) -> Iterator[Slot]:
        passed = []
        try:
            while self._heap:
                if not self._valid(self._heap[0]):
                    heapq.heappop(self._heap)
                    continue
                passed.append(heapq.heappop(self._heap))
                yield passed[-1][2]
        finally:
            for entry in passed:
                heapq.heappush(self._heap, entry)


class Belady(EvictionPolicy):
    """The one whose next use is farthest in the future: the bound that no policy beats. Needs the
    recorded trace.
    """

    def __init__(self, trace: Sequence[Key]) -> None:
        self.trace = trace
        self._ready: dict[int, Slot] = {}
        self._uses: dict[Key, list[int]] = {}
        for at in range(len(trace) - 1, -1, -1):
            self._uses.setdefault(trace[at], []).append(at)  # the next use is the last of the list

    def on_insert(self, slot: Slot) -> None:
        self._ready[slot.index] = slot

    def on_access(self, slot: Slot, token: int) -> None:
        assert slot.key is not None
        ahead = self._uses.get(slot.key)
        if ahead:
            ahead.pop()

    def on_evict(self, slot: Slot) -> None:
        del self._ready[slot.index]

    def order(self, token: int, row: int) -> Iterable[Slot]:
        def next_use(slot: Slot) -> int:
            ahead = self._uses.get(slot.key) if slot.key is not None else None
            return ahead[-1] if ahead else 1 << 60

        return sorted(self._ready.values(), key=next_use, reverse=True)


EVICTION: Mapping[str, Callable[[], EvictionPolicy]] = {
    "none": KeepNothing,
    "lru": LeastRecentlyUsed,
    "lrfu": DecayedFrequency,
    "least_stale": LeastStale,
}


def eviction_policy(name: str) -> EvictionPolicy:
    """A new policy by name. UserError for another."""
    if name not in EVICTION:
        raise UserError(f"eviction policy {name!r} is unknown; accepted: {', '.join(EVICTION)}")
    return EVICTION[name]()
