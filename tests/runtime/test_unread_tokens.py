"""Tokens that wait for a branch's own layer, beside the lists that they stand for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multirate.runtime.native.unread_tokens import UnreadTokens

WIDTH = 3
ACTIONS = st.lists(st.one_of(st.integers(1, 90), st.sampled_from(["seen", "clear"])), max_size=20)


@given(actions=ACTIONS, window=st.sampled_from([None, 1, 40, 100]), width=st.sampled_from([0, 3]))
def test_nothing_is_lost_before_the_layer_reads(
    actions: list[int | str], window: int | None, width: int
) -> None:
    unread, ids = UnreadTokens(width, window), list[int]()
    number = 0
    for action in actions:
        if action == "clear":
            unread.clear()
            ids = []
        elif action == "seen":
            unread.keep_seen()
            ids = ids if window is None else ids[-window:]
        else:
            new = np.arange(number, number + int(action))
            number += len(new)
            unread.add(new, np.repeat(new[:, None], WIDTH, 1).astype(np.float32))
            ids += new.tolist()
        assert len(unread) == len(ids) and unread.ids.tolist() == ids
        if width:
            np.testing.assert_array_equal(unread.carried[:, 0], ids)


@pytest.mark.parametrize("width", [0, WIDTH])
def test_pending_tokens_are_a_copy(width: int) -> None:
    unread = UnreadTokens(width, None)
    unread.add(np.arange(5), np.ones((5, WIDTH), np.float32))
    pending = unread.pending()
    unread.clear()
    unread.add(np.full(5, 9), np.zeros((5, WIDTH), np.float32))
    assert pending.ids == [0, 1, 2, 3, 4]
    assert [tuple(piece.shape) for piece in pending.carried] == ([(5, WIDTH)] if width else [])
    assert all(float(piece.min()) == 1.0 for piece in pending.carried)
