"""Predictions of a rank that rarely comes true are not read, are still watched, and are read again
when they do.
"""

from __future__ import annotations

import random

from multirate.experts.prefetch_filter import PrefetchFilter


def play(
    prefetch: PrefetchFilter, draw: random.Random, truth: dict[float, float], passes: int
) -> dict[float, int]:
    kept = dict.fromkeys(truth, 0)
    for _ in range(passes):
        needed = []
        for expert, (chance, share) in enumerate(truth.items()):
            kept[chance] += prefetch.keep((1, expert), 1, chance)
            needed += [expert] if draw.random() < share else []
        prefetch.outcome(1, needed)
        prefetch.new_pass()
    return kept


def test_ranks_are_judged_by_what_came_true() -> None:
    prefetch, draw = PrefetchFilter(0.6), random.Random(0)
    assert play(prefetch, draw, {1.0: 0.95, 0.25: 0.3}, 3)[1.0] == 3, "trusted at first"
    play(prefetch, draw, {1.0: 0.95, 0.25: 0.3}, 100)
    late = play(prefetch, draw, {1.0: 0.95, 0.25: 0.3}, 100)
    assert late[1.0] == 100 and late[0.25] < 5
    play(prefetch, draw, {1.0: 0.1, 0.25: 0.95}, 400)
    turned = play(prefetch, draw, {1.0: 0.1, 0.25: 0.95}, 100)
    assert turned[1.0] < 5 and turned[0.25] == 100


def test_a_prediction_is_judged_once_and_by_its_own_layer() -> None:
    """One miss is forgiven, two are not."""
    prefetch = PrefetchFilter(0.6)
    for _ in range(20):
        assert prefetch.keep((2, 7), 1, 1.0), "another layer's outcome is none of its own"
        prefetch.outcome(1, [])
        prefetch.new_pass()
        prefetch.outcome(2, [])  # too late: its pass is over
    prefetch.keep((2, 7), 1, 1.0)
    for _ in range(20):
        prefetch.outcome(2, [3])
    assert prefetch.keep((2, 7), 1, 1.0), "one prediction is one miss"
    prefetch.outcome(2, [3])
    assert not prefetch.keep((2, 7), 1, 1.0)
