"""Equal slots of memory and the experts in them: the state machine of the thread that computes.

FREE → LOADING → READY → FREE or LOADING (another expert). Invariants, checked by a property test:
- compute reads only READY slots that it holds (refs > 0);
- a held or LOADING slot is never evicted, nor one whose expert is pinned by the running layer:
  whoever needs one waits;
- a speculative load takes only a FREE slot or one that this token has not used;
- a key is in one slot at most; `generation` grows with every load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from multirate.experts.policies import EvictionPolicy

Key = tuple[int, int]
"""(row of the store's layers, expert)."""


class State(Enum):
    """What a slot holds."""

    FREE = "empty"
    LOADING = "loading"
    READY = "ready"


@dataclass(eq=False)
class Slot:
    """One slot. generation: how many experts it has held, so that a held slot can be seen not to
    have been loaded again. token: the pass that used or loaded it last; fresh: loaded ahead, not
    used yet.
    """

    index: int
    state: State = State.FREE
    key: Key | None = None
    refs: int = 0
    generation: int = 0
    token: int = -1
    fresh: bool = False


class ExpertCache:
    """`count` slots. token, row: the pass over the layers and the layer that is running; pinned:
    what it computes with;
    protected: predicted for the next layers, evicted for a demand only, and last.

    on_evict(slot): called before a READY slot loses its expert (statistics, tests).
    """

    def __init__(
        self, count: int, policy: EvictionPolicy, on_evict: Callable[[Slot], None] | None = None
    ) -> None:
        self.slots = [Slot(i) for i in range(count)]
        self.token, self.row = 0, 0
        self.pinned: set[Key] = set()
        self.protected: set[Key] = set()
        self._policy, self._on_evict = policy, on_evict
        self._slot_of: dict[Key, Slot] = {}
        self._free = list(reversed(self.slots))

    @property
    def occupied(self) -> int:
        """How many experts are there or on their way."""
        return len(self._slot_of)

    def find(self, key: Key) -> Slot | None:
        """The slot that has or is getting this expert."""
        return self._slot_of.get(key)

    def hold(self, key: Key) -> Slot | None:
        """The READY slot of `key`, held until `release`; None when it is not READY."""
        slot = self._slot_of.get(key)
        if slot is None or slot.state is not State.READY:
            return None
        slot.refs += 1
        slot.fresh = False
        return slot

    def touch(self, slot: Slot) -> None:
        """A READY slot's expert is needed by the running layer. Not left to `hold`, whose order is
        that of the reads: what is evicted must not depend on it.
        """
        slot.token, slot.fresh = self.token, False
        self._policy.on_access(slot, self.token)

    def release(self, slots: Iterable[Slot]) -> None:
        """Ends one hold of each."""
        for slot in slots:
            assert slot.refs > 0, "released more often than held"
            assert slot.key is not None
            slot.refs -= 1
            if len(self.pinned) >= len(
                self.slots
            ):  # more than fit: one that is done with makes room
                self.pinned.discard(slot.key)
            if not slot.refs and not self._policy.keeps:
                self._empty(slot)

    def pin(self, keys: Iterable[Key]) -> None:
        """The running layer computes with these, which are not evicted; none when it is done."""
        self.pinned = set(keys)

    def reserve(self, key: Key, speculative: bool) -> Slot | None:
        """A slot for `key`, LOADING; None when none may be taken now."""
        assert key not in self._slot_of, "an expert is loaded twice"
        slot = self._free.pop() if self._free else self._evict(speculative)
        if slot is None:
            return None
        slot.state, slot.key, slot.fresh = State.LOADING, key, speculative
        slot.generation += 1
        slot.token = self.token
        self._slot_of[key] = slot
        return slot

    def loaded(self, slot: Slot) -> None:
        """LOADING → READY."""
        assert slot.state is State.LOADING
        slot.state = State.READY
        self._policy.on_insert(slot)

    def abandon(self, slot: Slot) -> None:
        """LOADING → FREE: the load failed or is not wanted any more."""
        assert slot.state is State.LOADING
        self._empty(slot)

    def _evict(self, speculative: bool) -> Slot | None:
        spared: Slot | None = None
        for slot in self._policy.order(self.token, self.row):
            if slot.refs or slot.key in self.pinned or (speculative and slot.token >= self.token):
                continue
            if slot.key in self.protected:
                spared = spared or slot
                continue
            self._empty(slot)
            return self._free.pop()
        if spared is None or speculative:
            return None
        self._empty(spared)
        return self._free.pop()

    def _empty(self, slot: Slot) -> None:
        if slot.state is State.READY:
            if self._on_evict is not None:
                self._on_evict(slot)
            self._policy.on_evict(slot)
        if slot.key is not None:
            del self._slot_of[slot.key]
        slot.state, slot.key, slot.refs, slot.fresh = State.FREE, None, 0, False
        self._free.append(slot)
