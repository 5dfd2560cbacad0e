"""Which of two kinds of steps runs: the faster one, but for a share of the time."""

from __future__ import annotations

import random

import pytest

from multirate.methods.common.faster_kind import FasterKind


def run(
    choice: FasterKind,
    pace: tuple[float, float],
    tokens: int,
    spread: float = 0.0,
    seed: int = 0,
    per_step: tuple[int, int] = (10, 2),
) -> tuple[float, float]:
    """Texts of 100 tokens, `tokens` in all. → the seconds of a token, and the share of the tokens
    that are of kind 1.
    """
    noise, seconds, of_other, emitted_in_all = random.Random(seed), 0.0, 0, 0
    for _ in range(0, tokens, 100):
        choice.begin()
        left = 100
        while left > 0:
            kind = choice.choose()
            emitted = per_step[kind]
            if spread:
                emitted = max(1, round(noise.gauss(emitted, spread * emitted)))
            took = pace[kind] * per_step[kind]
            choice.observe(kind, took, emitted)
            seconds += took
            left -= emitted
            of_other += emitted * kind
            emitted_in_all += emitted
    return seconds / emitted_in_all, of_other / emitted_in_all


@pytest.mark.parametrize("ratio", [0.5, 0.9, 0.97, 1.03, 1.1, 1.5, 3.0])
@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_the_faster_kind_runs_and_trials_cost_little(ratio: float, spread: float) -> None:
    choice = FasterKind()
    run(choice, (1.0, ratio), 2000, spread)  # it gets to know them
    seconds, share = run(choice, (1.0, ratio), 10_000, spread, seed=1)
    assert seconds < min(1.0, ratio) * (1.015 if not spread else 1.06)
    if abs(ratio - 1) > 0.2:
        assert (share > 0.8) == (ratio < 1)


def test_a_kind_that_becomes_the_faster_one_is_found() -> None:
    choice = FasterKind()
    run(choice, (1.0, 1.3), 5000)
    run(choice, (1.0, 0.7), 3000)
    assert run(choice, (1.0, 0.7), 2000)[1] > 0.8
    run(choice, (1.0, 1.3), 3000)
    assert run(choice, (1.0, 1.3), 2000)[1] < 0.2


def test_a_machine_that_slows_down_is_not_the_other_kinds_gain() -> None:
    choice = FasterKind()
    run(choice, (1.0, 1.2), 5000)
    assert run(choice, (3.0, 3.6), 2000)[1] < 0.25


def test_an_interruption_says_little() -> None:
    choice = FasterKind()
    run(choice, (1.0, 1.1), 3000)
    choice.observe(0, 1000.0, 10)
    first, second = choice.seconds_per_token()
    assert first < 2.0 and abs(second / first - 1.1) < 0.2


def test_nothing_is_known_at_first() -> None:
    choice = FasterKind()
    choice.begin()
    assert choice.choose() == 0
    choice.observe(0, 5.0, 10)  # it read the prompt
    assert choice.choose() == 0
    choice.observe(0, 1.0, 10)
    first, second = choice.seconds_per_token()
    assert (first, second) == (pytest.approx(0.1), pytest.approx(0.11))
