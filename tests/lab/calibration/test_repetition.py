"""What counts as a loop."""

from __future__ import annotations

import numpy as np
import pytest

from multirate.lab.calibration.repetition import LONGEST_PERIOD, in_loops, share_in_loops


@pytest.mark.parametrize("period", [1, 2, 7, LONGEST_PERIOD])
def test_the_third_copy_and_all_that_follow_are_a_loop(period: int) -> None:
    unit = list(range(100, 100 + period))
    before, after = [1, 2, 3], [4, 5, 6]
    assert in_loops([*before, *unit * 2, *after]).sum() == 0
    assert in_loops([*before, *unit * 3, *after]).sum() == period
    assert in_loops([*before, *unit * 5, *after]).sum() == 3 * period


def test_text_without_repetition_and_short_answers_have_none() -> None:
    assert in_loops(np.random.default_rng(0).permutation(500).tolist()).sum() == 0
    assert in_loops([]).sum() == 0 and in_loops([7]).sum() == 0 and share_in_loops([[], []]) == 0.0


def test_the_share_is_of_all_tokens() -> None:
    assert share_in_loops([[5] * 10, list(range(10))]) == pytest.approx(8 / 20)
