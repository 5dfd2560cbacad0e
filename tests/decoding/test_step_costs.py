"""What a draft's rows and levels are worth: the hull of stepped costs, and thresholds that follow
the running rate.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multirate.decoding.speculate.budget import BudgetPolicy
from multirate.decoding.speculate.step_costs import StepCosts, convex_slopes


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=20))
def test_slopes_rise_and_never_charge_more_than_the_rows_cost(seconds: list[float]) -> None:
    slopes = convex_slopes(seconds)
    cost = np.maximum.accumulate(seconds)
    assert (np.diff(slopes) >= -1e-12).all()
    assert (cost[0] + slopes.cumsum() <= cost[1:] + 1e-9).all()
    assert cost[0] + slopes.sum() == pytest.approx(cost[-1])


def test_a_step_is_shared_by_its_rows() -> None:
    assert convex_slopes([1.0, 1.0, 1.6, 1.6, 1.6]).tolist() == pytest.approx([0.0, 0.2, 0.2, 0.2])


def test_thresholds_are_prices_over_the_present_seconds_per_token() -> None:
    costs = StepCosts(plain_step=1.0, verify={1: 1.0, 9: 1.8}, draft_step=0.1)
    draft_threshold, verify_threshold = BudgetPolicy(costs, nodes=4).thresholds()
    assert verify_threshold.tolist() == pytest.approx(
        [0.2] * 4
    )  # a row of 0.1 s at half a second per token
    assert draft_threshold.tolist() == pytest.approx([0.4] * 4)
    shared, _ = BudgetPolicy(costs, nodes=4).thresholds(sequences=2)
    # two sequences share a level and a step: 0.1 s of a row, 0.055 of the level (it takes longer,
    # as a step does), 0.275 a token; the further one of them gets ahead, the less of a token ends
    # the batch sooner
    alone = np.full(4, 0.155 / 0.275)
    assert shared[0] == pytest.approx(alone[0] * (1 + 0.35 * np.sqrt(np.log(2))))
    assert (np.diff(shared) >= 0).all() and shared[-1] == pytest.approx(0.9)
    # unless another sequence takes its place
    refilled, _ = BudgetPolicy(costs, nodes=4).thresholds(sequences=2, refilled=True)
    assert refilled == pytest.approx(alone)
