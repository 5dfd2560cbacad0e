"""Predictions of a rank that rarely comes true are not read, are still watched, and are read again
when they do.
"""

from __future__ import annotations

import random

from multirate.experts.prefetch_filter import PrefetchFilter


def play(
    worth: PrefetchFilter, draw: random.Random, truth: dict[float, float], passes: int
) -> dict[float, int]:
    kept = dict.fromkeys(truth, 0)
    for _ in range(passes):
        needed = []
        for expert, (chance, share) in enumerate(truth.items()):
            kept[chance] += worth.keep((1, expert), 1, chance)
            needed += [expert] if draw.random() < share else []
        worth.outcome(1, needed)
        worth.new_pass()
    return kept


def test_ranks_are_judged_by_what_came_true() -> None:
    worth, draw = PrefetchFilter(0.6), random.Random(0)
    assert play(worth, draw, {1.0: 0.95, 0.25: 0.3}, 3)[1.0] == 3, "trusted at first"
    play(worth, draw, {1.0: 0.95, 0.25: 0.3}, 100)
    late = play(worth, draw, {1.0: 0.95, 0.25: 0.3}, 100)
    assert late[1.0] == 100 and late[0.25] < 5
    play(worth, draw, {1.0: 0.1, 0.25: 0.95}, 400)
    turned = play(worth, draw, {1.0: 0.1, 0.25: 0.95}, 100)
    assert turned[1.0] < 5 and turned[0.25] == 100


def test_a_prediction_is_judged_once_and_by_its_own_layer() -> None:
    worth = PrefetchFilter(0.5)
    worth.keep((2, 7), 1, 1.0)
    worth.outcome(1, [7])
    assert not worth._counts
    worth.outcome(2, [3])
    worth.outcome(2, [3])
    assert len(worth._counts) == 1 and next(iter(worth._counts.values()))[1] < 3.0
    worth.keep((3, 1), 1, 1.0)
    worth.new_pass()
    worth.outcome(3, [1])
    assert next(iter(worth._counts.values()))[1] < 3.0
