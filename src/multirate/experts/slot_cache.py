"""Equal slots of memory and who is in them: the state machine that computing and loading share.

FREE → LOADING → READY → FREE or LOADING (another expert). Invariants, checked by a property test under threads:
- compute reads only READY slots that it holds (refs > 0);
- a held or LOADING slot is never evicted, nor one whose expert the running layer wants: whoever needs one waits;
- a speculative load takes only a FREE slot or one that this token has not used;
- a key is in one slot at most; `generation` grows with every load: whoever waited can tell that a slot changed hands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from multirate.experts.policies import EvictionPolicy

Key = tuple[int, int]
"""(row of the store's layers, expert)."""


class State(Enum):
    """What a slot holds."""

    FREE = "free"
    LOADING = "loading"
    READY = "ready"


@dataclass
class Slot:
    """One slot. last_use: a clock of uses; token: which used or loaded it last; fresh: loaded ahead, not used yet."""

    index: int
    state: State = State.FREE
    key: Key | None = None
    refs: int = 0
    generation: int = 0
    last_use: int = 0
    token: int = -1
    fresh: bool = False


class SlotCache:
    """`count` slots under one `lock`. `ready` is notified when a slot has become READY or a load has failed; `work`, on
    which readers wait, when there is something to load or, if one was `starved`, when a slot may be taken again.

    on_evict(slot): called, under the lock, before a READY slot loses its expert (statistics, tests).
    Methods whose name ends in `_locked` need the lock held.
    """

    def __init__(self, count: int, policy: EvictionPolicy, on_evict: Callable[[Slot], None] | None = None) -> None:
        self.slots = [Slot(i) for i in range(count)]
        self.lock = threading.Lock()
        self.ready, self.work = threading.Condition(self.lock), threading.Condition(self.lock)
        self.starved = False
        self.token, self.row = 0, 0
        self.wanted: set[Key] = set()  # what the running layer computes with
        self._policy, self._on_evict = policy, on_evict
        self._slot_of: dict[Key, Slot] = {}
        self._free = list(reversed(self.slots))
        self._clock = 0

    @property
    def occupied(self) -> int:
        """How many experts are there or on their way."""
        return len(self._slot_of)

    def find_locked(self, key: Key) -> Slot | None:
        """The slot that has or is getting this expert."""
        return self._slot_of.get(key)

    def hold_locked(self, key: Key) -> Slot | None:
        """The READY slot of `key`, held until `release`; None when it is not READY."""
        slot = self._slot_of.get(key)
        if slot is None or slot.state is not State.READY:
            return None
        slot.refs += 1
        self._clock += 1
        slot.last_use, slot.token, slot.fresh = self._clock, self.token, False
        self._policy.used(key, self.token)
        return slot

    def release(self, slots: Iterable[Slot]) -> None:
        """Ends one hold of each."""
        with self.lock:
            for slot in slots:
                assert slot.refs > 0, "released more often than held"
                assert slot.key is not None
                slot.refs -= 1
                if len(self.wanted) >= len(self.slots):  # more than fit: one that is done with makes room
                    self.wanted.discard(slot.key)
                if not slot.refs and not self._policy.keeps:
                    self._empty(slot)
            if self.starved:
                self.work.notify_all()

    def want(self, keys: list[Key]) -> None:
        """The running layer computes with these, which are not evicted; [] when it is done."""
        with self.lock:
            self.wanted = set(keys)
            if self.starved:
                self.work.notify_all()

    def reserve_locked(self, key: Key, speculative: bool) -> Slot | None:
        """A slot for `key`, LOADING; None when none may be taken now."""
        assert key not in self._slot_of, "an expert is loaded twice"
        slot = self._free.pop() if self._free else self._evict(speculative)
        if slot is None:
            return None
        slot.state, slot.key, slot.fresh = State.LOADING, key, speculative
        slot.generation += 1
        slot.token = self.token
        self._clock += 1
        slot.last_use = self._clock
        self._slot_of[key] = slot
        return slot

    def loaded_locked(self, slot: Slot) -> None:
        """LOADING → READY."""
        assert slot.state is State.LOADING
        slot.state = State.READY
        self.ready.notify_all()
        if self.starved:
            self.work.notify_all()

    def abandon_locked(self, slot: Slot) -> None:
        """LOADING → FREE: the load failed or is not wanted any more."""
        assert slot.state is State.LOADING
        self._empty(slot)
        self.ready.notify_all()
        if self.starved:
            self.work.notify_all()

    def _evict(self, speculative: bool) -> Slot | None:
        candidates = [
            slot for slot in self.slots
            if slot.state is State.READY and not slot.refs and slot.key not in self.wanted
            and not (speculative and slot.token >= self.token)
        ]  # fmt: skip
        if not candidates:
            return None
        slot = self._policy.victim(candidates, (self.token, self.row))
        self._empty(slot)
        return self._free.pop()

    def _empty(self, slot: Slot) -> None:
        if slot.state is State.READY and self._on_evict is not None:
            self._on_evict(slot)
        if slot.key is not None:
            del self._slot_of[slot.key]
        slot.state, slot.key, slot.refs, slot.fresh = State.FREE, None, 0, False
        self._free.append(slot)
