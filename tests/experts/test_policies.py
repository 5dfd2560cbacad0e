"""Eviction by decayed frequency is what its definition says, and beats recency on skewed uses."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from multirate.experts.expert_cache import ExpertCache, Key, Slot, State
from multirate.experts.policies import DecayedFrequency, EvictionPolicy, eviction_policy


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=40),
    st.floats(0.5, 0.99),
)
@settings(max_examples=60, deadline=None)
def test_the_victim_has_the_least_decayed_uses(uses: list[tuple[int, int]], decay: float) -> None:
    policy, token = DecayedFrequency(decay), 0
    history: dict[Key, list[int]] = {}
    slots: dict[Key, Slot] = {}
    for expert, passed in uses:
        token += passed
        key = (0, expert)
        if key not in slots:
            slots[key] = Slot(len(slots), State.READY, key)
            policy.on_insert(slots[key])
        policy.on_access(slots[key], token)
        history.setdefault(key, []).append(token)
    scores = {key: sum(decay ** (token - then) for then in times) for key, times in history.items()}
    ordered = [slot.key for slot in policy.order(token, 0)]
    assert sorted(ordered) == sorted(slots)
    found = [scores[key] for key in ordered if key is not None]
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(found))
    assert [slot.key for slot in policy.order(token, 0)] == ordered, "looking changes nothing"


def hit_rate(policy: EvictionPolicy, trace: list[Key], count: int) -> float:
    cache, hits = ExpertCache(count, policy), 0
    for token, key in enumerate(trace):
        cache.token = token
        slot = cache.find(key)
        hits += slot is not None
        if slot is None:
            slot = cache.reserve(key, speculative=False)
            assert slot is not None
            cache.loaded(slot)
        cache.touch(slot)
    return hits / len(trace)


def test_it_keeps_what_is_used_often() -> None:
    draw = random.Random(0)
    trace = [(0, int(draw.paretovariate(0.6)) % 60) for _ in range(3000)]
    assert (
        hit_rate(eviction_policy("lrfu"), trace, 12)
        > hit_rate(eviction_policy("lru"), trace, 12) + 0.02
    )


def test_a_slot_that_was_never_used_leaves_first() -> None:
    policy = DecayedFrequency()
    slots = [Slot(0, State.READY, (0, 1)), Slot(1, State.READY, (0, 2))]
    for slot in slots:
        policy.on_insert(slot)
    policy.on_access(slots[0], 0)
    assert [slot.key for slot in policy.order(5, 0)] == [(0, 2), (0, 1)]


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_least_stale_is_its_definition(seed: int) -> None:
    draw = random.Random(seed)
    policy, slots, last = eviction_policy("least_stale"), dict[Key, Slot](), dict[Key, int]()
    token = clock = 0
    for _ in range(draw.randint(1, 40)):
        token += draw.random() < 0.3
        key = (draw.randrange(4), draw.randrange(3))
        clock += 1
        if key not in slots:
            slots[key] = Slot(clock, State.READY, key, token=token)
            policy.on_insert(slots[key])
        elif draw.random() < 0.2:
            policy.on_evict(slots.pop(key))
            continue
        slots[key].token, last[key] = token, clock
        policy.on_access(slots[key], token)
    row = draw.randrange(4)

    def order(key: Key) -> tuple[int, int, int]:
        if slots[key].token < token:
            return (0, last[key], 0) if key[0] < row else (1, -key[0], last[key])
        return (2, -last[key], 0)

    assert [slot.key for slot in policy.order(token, row)] == sorted(slots, key=order)
