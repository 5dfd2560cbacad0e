"""What counts as a loop."""

from __future__ import annotations

import numpy as np
import pytest

from multirate.bench.repetition import LONGEST_PERIOD, looping, share_looping


@pytest.mark.parametrize("period", [1, 2, 7, LONGEST_PERIOD])
def test_the_third_copy_and_all_that_follow_are_a_loop(period: int) -> None:
    unit = list(range(100, 100 + period))
    before, after = [1, 2, 3], [4, 5, 6]
    assert looping([*before, *unit * 2, *after]) == 0
    assert looping([*before, *unit * 3, *after]) == period
    assert looping([*before, *unit * 5, *after]) == 3 * period


def test_text_without_repetition_and_short_answers_have_none() -> None:
    assert looping(np.random.default_rng(0).permutation(500).tolist()) == 0
    assert looping([]) == 0 and looping([7]) == 0 and share_looping([[], []]) == 0.0


def test_the_share_is_of_all_tokens() -> None:
    assert share_looping([[5] * 10, list(range(10))]) == pytest.approx(8 / 20)
