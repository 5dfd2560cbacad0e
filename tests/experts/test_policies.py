"""Eviction by decayed frequency is what its definition says, and beats recency on skewed uses."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from multirate.experts.policies import DecayedFrequency, EvictionPolicy, eviction_policy
from multirate.experts.slot_cache import Key, Slot, State


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=40), st.floats(0.5, 0.99))
@settings(max_examples=60, deadline=None)
def test_the_victim_has_the_least_decayed_uses(uses: list[tuple[int, int]], decay: float) -> None:
    policy, token = DecayedFrequency(decay), 0
    history: dict[Key, list[int]] = {}
    for expert, passed in uses:
        token += passed
        policy.used((0, expert), token)
        history.setdefault((0, expert), []).append(token)
    slots = [Slot(i, State.READY, key) for i, key in enumerate(history)]
    scores = {key: sum(decay ** (token - then) for then in times) for key, times in history.items()}
    chosen = policy.victim(slots, (token, 0)).key
    assert chosen is not None
    assert scores[chosen] <= min(scores.values()) * (1 + 1e-9)


def hit_rate(policy: EvictionPolicy, trace: list[Key], count: int) -> float:
    from multirate.experts.slot_cache import SlotCache

    cache, hits = SlotCache(count, policy), 0
    with cache.lock:
        for token, key in enumerate(trace):
            cache.token = token
            hits += cache.find_locked(key) is not None
            if cache.find_locked(key) is None:
                slot = cache.reserve_locked(key, speculative=False)
                assert slot is not None
                cache.loaded_locked(slot)
            held = cache.hold_locked(key)
            assert held is not None
            held.refs -= 1
    return hits / len(trace)


def test_it_keeps_what_is_used_often() -> None:
    draw = random.Random(0)
    trace = [(0, int(draw.paretovariate(0.6)) % 60) for _ in range(3000)]
    assert hit_rate(eviction_policy("lrfu"), trace, 12) > hit_rate(eviction_policy("lru"), trace, 12) + 0.02


def test_a_slot_that_was_never_used_leaves_first() -> None:
    policy = DecayedFrequency()
    policy.used((0, 1))
    slots = [Slot(0, State.READY, (0, 1)), Slot(1, State.READY, (0, 2))]
    assert policy.victim(slots, (5, 0)).key == (0, 2)
