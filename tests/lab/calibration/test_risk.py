"""The statistics keep what they guarantee on data of known risk."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from multirate.lab.calibration.risk import (
    Wager,
    p_value,
    samples_needed,
    try_in_order,
    try_threshold,
)


@pytest.mark.parametrize("risk", [0.05, 0.3, 0.5])
@pytest.mark.parametrize("loss", [1.0, 0.6])
def test_a_p_value_is_ever_below_p_with_a_probability_of_at_most_p(
    risk: float, loss: float
) -> None:
    """Exactly, over all courses of losses that are 0 or one value, of just the risk in mean."""
    samples, chance = 12, risk / loss
    found: list[tuple[float, float]] = []
    for course in itertools.product((0.0, loss), repeat=samples):
        lost = sum(one > 0 for one in course)
        found.append((p_value(course, risk), chance**lost * (1 - chance) ** (samples - lost)))
    values, chances = np.array(found).T
    assert chances.sum() == pytest.approx(1)
    assert len(np.unique(values)) > samples
    for level in np.unique(values[values < 1]):
        assert chances[values <= level].sum() <= level * (1 + 1e-9)


def test_a_p_value_keeps_what_it_has_seen() -> None:
    losses = shares(np.random.default_rng(0), 200, 0.02)
    wager, before = Wager(0.1), 1.0
    for loss in losses:
        wager.add(loss)
        assert wager.p_value <= before
        before = wager.p_value
    assert before == p_value(losses, 0.1) < 1e-4
    assert p_value([1.0] * 50, 0.1) == 1
    assert wager.best(0) == before > wager.best(10)


def test_it_sees_that_shares_of_tokens_vary_little() -> None:
    """A bound from the mean alone (Hoeffding's, relative entropy) wants more than twice the
    samples.
    """
    losses = shares(np.random.default_rng(0), 1000, 0.004, tokens=96)
    half = losses[:500]
    entropy = stats.entropy([losses.mean(), 1 - losses.mean()], [0.01, 0.99])
    assert p_value(half, 0.01) < math.exp(-1000 * entropy)


@pytest.mark.parametrize(("quality", "confidence", "needed"), [(0.99, 0.95, 324), (0.9, 0.95, 31)])
def test_so_many_samples_are_needed(quality: float, confidence: float, needed: int) -> None:
    risk = 1 - quality
    assert samples_needed(risk, confidence) == needed
    assert p_value([0.0] * needed, risk) <= 1 - confidence < p_value([0.0] * (needed - 1), risk)


def shares(drawn: np.random.Generator, samples: int, risk: float, tokens: int = 20) -> np.ndarray:
    """Losses as of answers: shares of tokens, half of the answers without any loss."""
    difficulty = 2 * drawn.integers(0, 2, (samples, 1))
    return (drawn.random((samples, tokens)) < difficulty * risk).mean(axis=1)


@pytest.mark.parametrize("samples", [60, 300])
def test_the_guarantee_is_kept_on_19_of_20_draws(samples: int) -> None:
    """Of thresholds whose risk is known, the chosen one's exceeds the guarantee in at most one draw
    of twenty, and the boldest allowed one is reached where the data are many.
    """
    guaranteed, confidence, draws = 0.1, 0.95, 200
    path = np.linspace(1, 0, 41)
    true_risk = {t: 0.2 * (1 - t) for t in path}  # 0.1 at the middle
    broken, chosen = 0, []
    for draw in range(draws):
        tested = try_in_order(
            path.tolist(),
            # the same prompts at every threshold
            lambda t, draw=draw: shares(np.random.default_rng(draw), samples, true_risk[t]),  # type: ignore[misc]
            samples,
            guaranteed,
            confidence,
        )
        held = [one for one in tested if one.holds]
        assert [one.holds for one in tested] == [True] * len(held) + [False] * (
            len(tested) > len(held)
        )
        chosen.append(true_risk[held[-1].threshold])
        broken += chosen[-1] > guaranteed
    assert broken <= draws / 20
    assert np.mean(chosen) > (0.015 if samples == 60 else 0.05), "cautious, and not for nothing"


def test_a_threshold_at_the_edge_is_guaranteed_in_at_most_one_draw_of_twenty() -> None:
    """The hardest case: the risk is only just too large, and only this one is tried."""
    rng = np.random.default_rng(0)
    guaranteed, samples = 0.05, 200
    wrong = sum(
        try_threshold(
            0.5, shares(rng, samples, guaranteed * 1.001), samples, guaranteed, 0.95
        ).holds
        for _ in range(600)
    )
    assert wrong <= 30


def test_it_stops_looking_when_nothing_can_save_a_threshold() -> None:
    looked = 0

    def losses() -> object:
        nonlocal looked
        while True:
            looked += 1
            yield 1.0

    tested = try_threshold(0.5, losses(), 1000, 0.01, 0.95)  # type: ignore[arg-type]
    assert not tested.holds and tested.p_value == 1 and looked == len(tested.losses) < 20
    assert tested.mean == 1.0
    most = next(k for k in range(1000) if p_value([1.0] * k + [0.0] * (1000 - k), 0.01) > 0.05)
    assert looked == most
    good = try_threshold(0.5, [1.0] * (most - 1) + [0.0] * (1001 - most), 1000, 0.01, 0.95)
    assert good.holds
    good = try_threshold(0.5, iter([0.0] * 1000), 1000, 0.01, 0.95)
    assert good.holds and len(good.losses) == samples_needed(0.01, 0.95), "no more than it takes"


def test_too_few_samples_guarantee_nothing() -> None:
    needed = samples_needed(0.01, 0.95)
    assert not try_threshold(0.5, [0.0] * (needed - 1), needed - 1, 0.01, 0.95).holds
    assert try_threshold(0.5, [0.0] * needed, needed, 0.01, 0.95).holds
