"""How far continuations of the text are followed: the rates that come true, and what is worth
following by them.
"""

from __future__ import annotations

import numpy as np
import pytest

from multirate.decoding.speculate.acceptance_statistics import ContinuationRates, Origin
from multirate.methods._shared.draft_tree import DraftTree

FREE = np.zeros(8)


def rates_of(first_accepted: float, next_accepted: float) -> ContinuationRates:
    trust = ContinuationRates(3)
    trust.first_accepted[:], trust.next_accepted[:] = first_accepted, next_accepted
    return trust


def test_rates_go_to_what_comes_true() -> None:
    trust = ContinuationRates(2)
    for _ in range(300):
        trust.observe(
            Origin(drafted=2, continued=5, matched=2), accepted_drafted=2, accepted_continued=3
        )
        trust.observe(
            Origin(drafted=0, continued=4, matched=1), accepted_drafted=0, accepted_continued=0
        )
    assert trust.draft_accepted > 0.95
    assert trust.first_accepted[2] > 0.9 and trust.next_accepted[2] == pytest.approx(
        2 / 3, abs=0.05
    )  # two of three tried next_accepted
    assert trust.first_accepted[1] < 0.15


def test_what_was_never_reached_says_nothing_and_doubt_fades() -> None:
    trust = ContinuationRates(2)
    before = trust.first_accepted.copy()
    for _ in range(15):
        trust.observe(
            Origin(drafted=3, continued=5, matched=2), accepted_drafted=1, accepted_continued=0
        )
    assert (trust.first_accepted == before).all() and trust.draft_accepted < 0.6
    for _ in range(20):
        trust.observe(Origin(0, 4, 1), 0, 0)
    doubted = trust.first_accepted[1]
    for _ in range(200):
        trust.observe(Origin(2), 2, 0)
    assert doubted < 0.2 < 0.55 < trust.first_accepted[1]


@pytest.mark.parametrize(
    ("first_accepted", "next_accepted", "length"), [(1.0, 1.0, 8), (0.05, 1.0, 0), (0.9, 0.5, 3)]
)
def test_a_continuation_is_followed_as_far_as_its_rows_pay(
    first_accepted: float, next_accepted: float, length: int
) -> None:
    tree = DraftTree(depth_limit=8, deepest=8)
    verify_threshold, draft_threshold = np.full(8, 0.2), np.full(8, 0.4)
    assert (
        tree.continuation_length(
            8, 0.6, 2, rates_of(first_accepted, next_accepted), draft_threshold, verify_threshold
        )
        == length
    )


def test_the_stream_goes_on_where_that_is_better() -> None:
    tree = DraftTree(depth_limit=8, deepest=8)
    sure, trust = 0.99, rates_of(0.8, 0.5)
    trust.draft_accepted = 0.99
    assert tree.continuation_length(8, sure, 2, trust, np.full(8, 0.1), np.full(8, 0.1)) == 0
    trust.draft_accepted = 0.2
    assert tree.continuation_length(8, sure, 2, trust, np.full(8, 0.1), np.full(8, 0.1)) > 0


def test_followed_tokens_end_the_chain_and_other_candidates_stay_leaves() -> None:
    tree = DraftTree(depth_limit=8, deepest=8)
    frontier = tree.grow([0], [[5, 6]], [[0.7, 0.2]], 1, FREE, FREE)
    assert frontier == [1] and tree.is_chain and tree.drafted == 1
    tree.continue_with([7, 8], matched=2)
    assert tree.grow([1], [[7, 9]], [[0.9, 0.1]], 0, FREE, FREE, first=1) == []
    tree.finish(FREE)
    assert (
        tree.tokens == [5, 7, 8, 6, 9]
        and tree.parents == [0, 1, 2, 0, 1]
        and tree.origin == Origin(1, 2, 2)
    )
    assert tree.accepted([0, 1, 2, 5]) == (1, 1)
