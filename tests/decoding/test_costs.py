"""Draft length and cost model: the arithmetic against brute force, the measurement on a real decoder."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multirate.decoding.costs import VERIFY_ROWS, CostModel, measure_costs
from multirate.decoding.draft_length import (
    AcceptanceEstimate,
    DraftLengthController,
    RoundCosts,
    best_length,
    expected_tokens,
)

from .helpers import tiny

CHEAP = RoundCosts(plain_step=1.0, verify={1: 0.9, 8: 1.0, 16: 1.4}, draft_step=0.1, draft_fixed=0.1)
DEAR = RoundCosts(plain_step=1.0, verify={1: 1.0, 8: 4.0}, draft_step=0.9)


def test_verify_seconds_interpolate_and_extrapolate() -> None:
    assert CHEAP.verify_seconds(1) == 0.9
    assert CHEAP.verify_seconds(12) == pytest.approx(1.2)
    assert CHEAP.verify_seconds(24) == pytest.approx(1.8)
    assert RoundCosts(1.0, {4: 2.0}, 0.1).verify_seconds(9) == 2.0


@given(rates=st.lists(st.floats(0, 1), min_size=1, max_size=6), seed=st.integers(0, 50))
def test_expected_tokens_is_the_mean_of_simulated_rounds(rates: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    hits = rng.random((4000, len(rates))) < np.array(rates)
    mean = 1 + np.cumprod(hits, axis=1).sum(axis=1).mean()
    assert expected_tokens(rates, len(rates)) == pytest.approx(mean, abs=0.25)


def test_best_length_follows_costs_and_acceptance() -> None:
    assert best_length(DEAR, [0.5] * 8, 8)[0] == 0
    lengths = [best_length(CHEAP, [a] * 12, 12)[0] for a in (0.05, 0.5, 0.8, 0.99)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[-1] >= 7
    _, speed = best_length(CHEAP, [0.8] * 12, 12)
    assert speed == max(expected_tokens([0.8] * 12, n) / CHEAP.round_seconds(n) for n in range(13))
    assert best_length(CHEAP, [0.99] * 12, 3)[0] == 3


def test_estimate_learns_conditional_rates() -> None:
    rng = np.random.default_rng(0)
    estimate = AcceptanceEstimate(4, decay=1.0)
    true = [0.9, 0.6, 0.8, 0.3]
    for _ in range(3000):
        hits = rng.random(4) < true
        estimate.observe(4, int(np.cumprod(hits).sum()))
    assert estimate.rates() == pytest.approx(true, abs=0.04)


def test_controller_shortens_lengthens_and_probes() -> None:
    controller = DraftLengthController(CHEAP, 8, probe_every=5)
    for _ in range(200):
        controller.observe(6, 0)
    asked = [controller.length(8) for _ in range(10)]
    assert asked == [0, 0, 0, 0, 1] * 2
    for _ in range(200):
        controller.observe(8, 8)
    assert controller.length(8) >= 6
    assert controller.length(2) == 2
    assert controller.length(0) == 0


def test_a_node_is_worth_its_chance() -> None:
    controller = DraftLengthController(CHEAP, 8)
    assert controller.worth_node(1, 0.9)
    assert not controller.worth_node(3, 0.05)
    assert not controller.worth_node(9, 1.0)
    assert not DraftLengthController(DEAR, 8).worth_node(1, 0.9)


def test_the_confidence_rule_beats_every_fixed_length() -> None:
    """Simulated text of easy and hard stretches: stopping by confidence yields more tokens per second."""
    rng = np.random.default_rng(1)
    costs = RoundCosts(1.0, {1: 0.8, 16: 1.2}, 0.15, 0.15)
    texts = [rng.choice([0.35, 0.97], 12) for _ in range(1500)]
    controller = DraftLengthController(costs, 10)

    def accepted_of(chances: np.ndarray) -> int:
        return int(np.cumprod(rng.random(len(chances)) < chances).sum())

    tokens = seconds = 0.0
    for chances in texts:
        reached, length = 1.0, 0
        while length < 10:
            reached *= controller.calibrated(float(chances[length]))
            if length and not controller.worth_node(length + 1, reached):
                break
            length += 1
        accepted = accepted_of(chances[:length])
        controller.observe(length, accepted, chances[:length].tolist())
        tokens += accepted + 1
        seconds += costs.round_seconds(length)
    fixed = [sum(accepted_of(c[:n]) + 1 for c in texts) / (len(texts) * costs.round_seconds(n)) for n in range(11)]
    assert tokens / seconds > 1.03 * max(fixed)


def test_calibration_learns_overconfidence() -> None:
    controller = DraftLengthController(CHEAP, 4)
    for i in range(400):
        controller.observe(1, int(i % 2 == 0), [0.95])
    assert controller.calibrated(0.95) == pytest.approx(0.5, abs=0.1)
    assert controller.calibrated(0.25) == 0.25


def test_verdicts() -> None:
    good = CostModel(CHEAP).verdict(0.8)
    assert good.pays
    assert good.speedup > 1.5
    assert f"{good.speedup:.2f}x" in good.message
    assert CostModel(CHEAP).verdict(good.break_even - 0.02).pays is False  # type: ignore[operator]
    assert CostModel(CHEAP).verdict(good.break_even + 0.02).pays is True  # type: ignore[operator]
    bad = CostModel(DEAR).verdict(0.9)
    assert not bad.pays
    assert bad.break_even is None
    assert "does not pay" in bad.message
    assert CostModel(CHEAP).verdict([0.9, 0.5]).length <= 2


@pytest.mark.parametrize("start", [0, 1])
def test_measured_on_a_decoder(start: int) -> None:
    _, decoder = tiny(0)
    calls = []
    model = measure_costs(decoder, start, draft_step=(lambda: calls.append(1)) if start == 0 else None)
    costs = model.costs
    assert 4 in costs.verify
    assert set(costs.verify) <= set(VERIFY_ROWS)
    assert min(costs.plain_step, *costs.verify.values()) > 0
    assert (costs.draft_step > 0, costs.draft_fixed > 0) == (True, start > 0)
    assert bool(calls) == (start == 0)
    assert measure_costs(decoder, 0).costs.draft_step == 0
    rushed = measure_costs(decoder, start, budget_seconds=0)
    assert set(rushed.costs.verify) == {4}
