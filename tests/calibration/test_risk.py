"""The statistics keep what they promise on data of known risk."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from multirate.calibration.risk import (
    binomial_cdf,
    most_loss,
    p_value,
    samples_needed,
    try_in_order,
    try_threshold,
)


@pytest.mark.parametrize("trials", [1, 7, 300, 2000])
@pytest.mark.parametrize("chance", [0.001, 0.05, 0.5, 0.99])
def test_binomial_cdf_is_scipys(trials: int, chance: float) -> None:
    for successes in sorted({0, 1, trials // 3, trials - 1, trials}):
        expected = stats.binom.cdf(successes, trials, chance)
        assert binomial_cdf(successes, trials, chance) == pytest.approx(expected, rel=1e-9)


def test_p_value_is_the_smaller_of_both_bounds() -> None:
    n, risk = 400, 0.1
    for mean in (0.0, 0.02, 0.05, 0.09):
        divergence = stats.entropy([mean, 1 - mean], [risk, 1 - risk])
        bentkus = math.e * stats.binom.cdf(math.ceil(n * mean - 1e-9), n, risk)
        expected = min(math.exp(-n * divergence), bentkus)
        assert p_value(mean, n, risk) == pytest.approx(expected, rel=1e-6)
    assert p_value(risk, n, risk) == p_value(0.4, n, risk) == 1
    values = [p_value(mean, n, risk) for mean in np.linspace(0, 0.2, 50)]
    assert values == sorted(values)


@pytest.mark.parametrize(("quality", "confidence", "needed"), [(0.99, 0.95, 299), (0.9, 0.95, 29)])
def test_so_many_samples_are_needed(quality: float, confidence: float, needed: int) -> None:
    risk = 1 - quality
    assert samples_needed(risk, confidence) == needed
    assert p_value(0, needed, risk) <= 1 - confidence < p_value(0, needed - 1, risk)


def shares(drawn: np.random.Generator, samples: int, risk: float, tokens: int = 20) -> np.ndarray:
    """Losses as of answers: shares of tokens, half of the answers without any loss."""
    difficulty = 2 * drawn.integers(0, 2, (samples, 1))
    return (drawn.random((samples, tokens)) < difficulty * risk).mean(axis=1)


@pytest.mark.parametrize("samples", [60, 300])
def test_the_promise_is_kept_on_19_of_20_draws(samples: int) -> None:
    """Of thresholds whose risk is known, the chosen one's exceeds the promise in at most one draw
    of twenty, and the boldest allowed one is reached where the data are many.
    """
    promised, confidence, draws = 0.1, 0.95, 200
    path = np.linspace(1, 0, 41)
    true_risk = {t: 0.2 * (1 - t) for t in path}  # 0.1 at the middle
    broken, chosen = 0, []
    for draw in range(draws):
        tested = try_in_order(
            path.tolist(),
            # the same prompts at every threshold
            lambda t, draw=draw: shares(np.random.default_rng(draw), samples, true_risk[t]),  # type: ignore[misc]
            samples,
            promised,
            confidence,
        )
        held = [one for one in tested if one.holds]
        assert [one.holds for one in tested] == [True] * len(held) + [False] * (
            len(tested) > len(held)
        )
        chosen.append(true_risk[held[-1].threshold])
        broken += chosen[-1] > promised
    assert broken <= draws / 20
    assert np.mean(chosen) > (0.015 if samples == 60 else 0.05), "cautious, and not for nothing"


def test_a_threshold_at_the_edge_is_promised_in_at_most_one_draw_of_twenty() -> None:
    """The hardest case: the risk is only just too large, and only this one is tried."""
    rng = np.random.default_rng(0)
    promised, samples = 0.05, 200
    wrong = sum(
        try_threshold(0.5, shares(rng, samples, promised * 1.001), samples, promised, 0.95).holds
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
    most = next(k for k in range(1000) if p_value(k / 1000, 1000, 0.01) > 0.05)
    assert looked == most and most - 1 <= 1000 * most_loss(1000, 0.01, 0.95) < most
    good = try_threshold(0.5, [1.0] * (most - 1) + [0.0] * (1001 - most), 1000, 0.01, 0.95)
    assert good.holds and len(good.losses) == 1000


def test_too_few_samples_promise_nothing() -> None:
    assert not try_threshold(0.5, [0.0] * 298, 298, 0.01, 0.95).holds
    assert try_threshold(0.5, [0.0] * 299, 299, 0.01, 0.95).holds
