"""Who leaves the cache. A policy orders the slots that may be evicted; the cache decides which may (slot_cache.py)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from multirate.errors import UserError

if TYPE_CHECKING:
    from multirate.experts.slot_cache import Key, Slot


class EvictionPolicy:
    """Chooses a victim. `now`: (token, row of the layer being computed). keeps: False empties a slot on release."""

    keeps = True

    def used(self, key: Key, token: int = 0) -> None:
        """An expert is about to be computed with, in the `token`-th pass over the layers."""

    def victim(self, slots: Iterable[Slot], now: tuple[int, int]) -> Slot:
        """One of `slots` (at least one)."""
        raise NotImplementedError


class KeepNothing(EvictionPolicy):
    """On demand: every use is a read."""

    keeps = False

    def victim(self, slots: Iterable[Slot], now: tuple[int, int]) -> Slot:
        return next(iter(slots))


class LeastRecentlyUsed(EvictionPolicy):
    """The one whose last use is longest ago."""

    def victim(self, slots: Iterable[Slot], now: tuple[int, int]) -> Slot:
        return min(slots, key=lambda slot: slot.last_use)


class LeastFrequentlyUsed(EvictionPolicy):
    """The one used least often since the start; of equals the one longest ago."""

    def __init__(self) -> None:
        self._uses: Counter[Key] = Counter()

    def used(self, key: Key, token: int = 0) -> None:
        self._uses[key] += 1

    def victim(self, slots: Iterable[Slot], now: tuple[int, int]) -> Slot:
        return min(slots, key=lambda slot: (self._uses[slot.key] if slot.key is not None else 0, slot.last_use))


class DecayedFrequency(EvictionPolicy):
    """The one with the least uses, each counting `decay` less with every token since: between least recently and least
    frequently used (LRFU, Lee et al. 2001)."""

    def __init__(self, decay: float = 0.97) -> None:
        self._loss = -math.log(decay)
        self._rank: dict[Key | None, float] = {}  # ln(score) + loss · token: all scores fade alike, so ranks stand

    def used(self, key: Key, token: int = 0) -> None:
        before = self._rank.get(key)
        score = 1.0 if before is None else 1.0 + math.exp(before - self._loss * token)
        self._rank[key] = math.log(score) + self._loss * token

    def victim(self, slots: Iterable[Slot], now: tuple[int, int]) -> Slot:
        rank = self._rank
        return min(slots, key=lambda slot: rank.get(slot.key, -math.inf))


class LeastStale(EvictionPolicy):
    """What an earlier token left goes first. [our reading of SpecMD's least-stale]

    Layers are visited in a cycle, so of what an earlier token left, the layers already passed in this token have had
    their chance: they go first, the oldest first; then the layers ahead, the farthest first. Of what this token itself
    used, the last is needed again last: it goes first.
    """

    def victim(self, slots: Iterable[Slot], now: tuple[int, int]) -> Slot:
        token, row = now

        def order(slot: Slot) -> tuple[int, int]:
            assert slot.key is not None
            if slot.token < token:
                return (0, slot.last_use) if slot.key[0] < row else (1, -slot.key[0])
            return (2, -slot.last_use)

        return min(slots, key=order)


class Belady(EvictionPolicy):
    """The one whose next use is farthest in the future: the bound that no policy beats. Needs the recorded trace."""

    def __init__(self, trace: Sequence[Key]) -> None:
        self._uses: dict[Key, list[int]] = {}
        for at in range(len(trace) - 1, -1, -1):
            self._uses.setdefault(trace[at], []).append(at)  # the next use is the last of the list

    def used(self, key: Key, token: int = 0) -> None:
        ahead = self._uses.get(key)
        if ahead:
            ahead.pop()

    def victim(self, slots: Iterable[Slot], now: tuple[int, int]) -> Slot:
        def next_use(slot: Slot) -> int:
            ahead = self._uses.get(slot.key) if slot.key is not None else None
            return ahead[-1] if ahead else 1 << 60

        return max(slots, key=next_use)


EVICTION: Mapping[str, Callable[[], EvictionPolicy]] = {
    "none": KeepNothing, "lru": LeastRecentlyUsed, "lfu": LeastFrequentlyUsed, "lrfu": DecayedFrequency,
    "least_stale": LeastStale,
}  # fmt: skip


def eviction_policy(name: str) -> EvictionPolicy:
    """A new policy by name. UserError for another."""
    if name not in EVICTION:
        raise UserError(f"eviction policy {name!r} is unknown; accepted: {', '.join(EVICTION)}")
    return EVICTION[name]()
