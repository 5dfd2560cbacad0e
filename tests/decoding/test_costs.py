"""Draft length and cost model: the arithmetic against brute force, the measurement on a real
decoder.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multirate.decoding.speculate.acceptance_statistics import Calibration, DecayedRate
from multirate.decoding.speculate.budget import BudgetPolicy
from multirate.decoding.speculate.costs import VERIFY_ROWS, CostModel, measure_costs
from multirate.decoding.speculate.step_costs import StepCosts, expected_tokens

from .helpers import tiny

CHEAP = StepCosts(plain_step=1.0, verify={1: 0.9, 8: 1.0, 16: 1.4}, draft_step=0.1, draft_fixed=0.1)
DEAR = StepCosts(plain_step=1.0, verify={1: 1.0, 8: 4.0}, draft_step=0.9)


def test_verify_seconds_interpolate_and_extrapolate() -> None:
    assert CHEAP.verify_seconds(1) == 0.9
    assert CHEAP.verify_seconds(12) == pytest.approx(1.2)
    assert CHEAP.verify_seconds(24) == pytest.approx(1.8)
    assert StepCosts(1.0, {4: 2.0}, 0.1).verify_seconds(9) == 2.0


@given(rates=st.lists(st.floats(0, 1), min_size=1, max_size=6), seed=st.integers(0, 50))
def test_expected_tokens_is_the_mean_of_simulated_rounds(rates: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    hits = rng.random((4000, len(rates))) < np.array(rates)
    mean = 1 + np.cumprod(hits, axis=1).sum(axis=1).mean()
    assert expected_tokens(rates, len(rates)) == pytest.approx(mean, abs=0.25)


def test_best_length_follows_costs_and_acceptance() -> None:
    cheap, dear = CostModel(CHEAP, longest=12), CostModel(DEAR, longest=8)
    assert dear.speedup(0.5)[1] < 1
    lengths = [cheap.speedup(a)[0] for a in (0.05, 0.5, 0.8, 0.99)]
    assert lengths == sorted(lengths)
    assert cheap.speedup(0.05)[1] < 1
    assert lengths[-1] >= 7
    _, speed = cheap.speedup(0.8)
    assert speed == max(
        expected_tokens([0.8] * 12, n) / CHEAP.step_seconds(n) for n in range(1, 13)
    )
    assert cheap.speedup([0.99] * 3)[0] == 3


def test_a_rate_learns_and_forgets() -> None:
    rng = np.random.default_rng(0)
    lasting = DecayedRate(memory=1.0)
    for held in rng.random(3000) < 0.6:
        lasting.observe(1, int(held))
    assert lasting.rate(0.1) == pytest.approx(0.6, abs=0.04)
    assert DecayedRate().rate(0.7) == 0.7
    recent = DecayedRate()
    recent.observe(300, 300)
    recent.observe(200, 0)
    assert recent.rate(0.5) < 0.1


def test_a_node_is_worth_its_chance() -> None:
    """Where steps bring fewer tokens a smaller chance is worth a node, however fast the machine is;
    none is where a level costs what a token does.
    """
    now = 0.0
    policy = BudgetPolicy(CHEAP, 8)
    policy.clock = lambda: now
    before = policy.thresholds()[0].copy()
    assert before[0] < 0.5 and (np.diff(before) >= 0).all()

    def after(steps: int, tokens: int, slower: float) -> np.ndarray:
        nonlocal now
        for _ in range(steps):
            now += slower * CHEAP.step_seconds(1)
            policy.emitted(tokens, levels=1, nodes=1)
            found, keep = policy.thresholds()
            assert (keep <= found).all()
        return found.copy()

    few = after(200, 1, 1.0)
    assert (few < before).all()
    assert (after(200, 4, 1.0) > 2 * few).all()
    assert (BudgetPolicy(DEAR, 8).thresholds()[0] >= 0.9).all()


def test_the_confidence_rule_beats_every_fixed_length() -> None:
    """Simulated text of easy and hard stretches: stopping by confidence yields more tokens per
    second.
    """
    rng = np.random.default_rng(1)
    costs = StepCosts(1.0, {1: 0.8, 16: 1.2}, 0.15, 0.15)
    texts = [rng.choice([0.35, 0.97], 12) for _ in range(1500)]
    now = 0.0
    policy, calibrated = BudgetPolicy(costs, 10), Calibration()
    policy.clock = lambda: now

    def accepted_of(chances: np.ndarray) -> int:
        return int(np.cumprod(rng.random(len(chances)) < chances).sum())

    tokens = seconds = 0.0
    for chances in texts:
        path, length = 1.0, 0
        worth, _ = policy.thresholds()
        while length < 10:
            path *= calibrated(float(chances[length]))
            if length and path < worth[length]:
                break
            length += 1
        accepted = accepted_of(chances[:length])
        calibrated.observe(chances[:length].tolist(), accepted)
        policy.emitted(accepted + 1)
        now += costs.step_seconds(length)
        tokens += accepted + 1
        seconds += costs.step_seconds(length)
    fixed = [
        sum(accepted_of(c[:n]) + 1 for c in texts) / (len(texts) * costs.step_seconds(n))
        for n in range(11)
    ]
    assert tokens / seconds > 1.03 * max(fixed)


def test_calibration_learns_overconfidence() -> None:
    calibrated = Calibration()
    for i in range(400):
        calibrated.observe([0.95], int(i % 2 == 0))
    assert calibrated(0.95) == pytest.approx(0.5, abs=0.1)
    assert calibrated(0.25) == 0.25


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
    assert "is not faster" in bad.message
    assert CostModel(CHEAP).verdict([0.9, 0.5]).length <= 2


@pytest.mark.parametrize("start", [0, 1])
def test_measured_on_a_decoder(start: int) -> None:
    _, decoder = tiny(0)
    calls = []
    model = measure_costs(
        decoder, start, draft_step=(lambda: calls.append(1)) if start == 0 else None
    )
    costs = model.costs
    assert 4 in costs.verify
    assert set(costs.verify) <= set(VERIFY_ROWS)
    assert min(costs.plain_step, *costs.verify.values()) > 0
    assert (costs.draft_step > 0, costs.draft_fixed > 0) == (True, start > 0)
    assert bool(calls) == (start == 0)
    assert measure_costs(decoder, 0).costs.draft_step == 0
    rushed = measure_costs(decoder, start, budget_seconds=0)
    assert set(rushed.costs.verify) == {4}
