"""How far suggestions of the text are followed: the rates that come true, and what is worth
following by them.
"""

from __future__ import annotations

import numpy as np
import pytest

from multirate.decoding.acceptance_statistics import Origin, SuggestionRates
from multirate.methods.m2r2.tree import DraftTree

FREE = np.zeros(8)


def trusting(agree: float, onward: float) -> SuggestionRates:
    trust = SuggestionRates(3)
    trust.agree[:], trust.onward[:] = agree, onward
    return trust


def test_rates_go_to_what_comes_true() -> None:
    trust = SuggestionRates(2)
    for _ in range(300):
        trust.observe(Origin(drawn=2, followed=5, matched=2), true_drawn=2, true_followed=3)
        trust.observe(Origin(drawn=0, followed=4, matched=1), true_drawn=0, true_followed=0)
    assert trust.steady > 0.95
    assert trust.agree[2] > 0.9 and trust.onward[2] == pytest.approx(
        2 / 3, abs=0.05
    )  # two of three tried onward
    assert trust.agree[1] < 0.15


def test_what_was_never_reached_says_nothing_and_doubt_fades() -> None:
    trust = SuggestionRates(2)
    before = trust.agree.copy()
    for _ in range(15):
        trust.observe(Origin(drawn=3, followed=5, matched=2), true_drawn=1, true_followed=0)
    assert (trust.agree == before).all() and trust.steady < 0.6
    for _ in range(20):
        trust.observe(Origin(0, 4, 1), 0, 0)
    doubted = trust.agree[1]
    for _ in range(200):
        trust.observe(Origin(2), 2, 0)
    assert doubted < 0.2 < 0.55 < trust.agree[1]


@pytest.mark.parametrize(
    ("agree", "onward", "length"), [(1.0, 1.0, 8), (0.05, 1.0, 0), (0.9, 0.5, 3)]
)
def test_a_suggestion_is_followed_as_far_as_its_rows_pay(
    agree: float, onward: float, length: int
) -> None:
    tree = DraftTree(depth_limit=8, deepest=8)
    keep, expand = np.full(8, 0.2), np.full(8, 0.4)
    assert tree.worth_following(8, 0.6, 2, trusting(agree, onward), expand, keep) == length


def test_the_stream_goes_on_where_that_is_better() -> None:
    tree = DraftTree(depth_limit=8, deepest=8)
    sure, trust = 0.99, trusting(0.8, 0.5)
    trust.steady = 0.99
    assert tree.worth_following(8, sure, 2, trust, np.full(8, 0.1), np.full(8, 0.1)) == 0
    trust.steady = 0.2
    assert tree.worth_following(8, sure, 2, trust, np.full(8, 0.1), np.full(8, 0.1)) > 0


def test_followed_tokens_end_the_chain_and_other_candidates_stay_leaves() -> None:
    tree = DraftTree(depth_limit=8, deepest=8)
    frontier = tree.grow([0], [[5, 6]], [[0.7, 0.2]], 1, FREE, FREE)
    assert frontier == [1] and tree.is_chain and tree.drawn == 1
    tree.follow([7, 8], matched=2)
    assert tree.grow([1], [[7, 9]], [[0.9, 0.1]], 0, FREE, FREE, first=1) == []
    tree.finish(FREE)
    assert (
        tree.tokens == [5, 7, 8, 6, 9]
        and tree.parents == [0, 1, 2, 0, 1]
        and tree.origin == Origin(1, 2, 2)
    )
    assert tree.accepted([0, 1, 2, 5]) == (1, 1)
