"""Rows and the cache's bookkeeping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multirate.runtime.kv_cache import KVCache, LayerKV
from multirate.runtime.rows import Rows

LAYOUT = [LayerKV(2, 3, 4, torch.float32, torch.device("cpu"))] * 2


def visible(rows: Rows, n: int) -> set[int]:
    """The definition in words: slots [0, prefix) and prefix + k for every set bit k."""
    bits = {k for k in range(63) if int(rows.tree[n]) >> k & 1}
    return set(range(rows.prefix[n])) | {int(rows.prefix[n]) + k for k in bits}


@settings(deadline=None)  # the machine may be busy
@given(st.integers(0, 50), st.integers(1, 9))
def test_causal_rows_see_themselves_and_all_before(start: int, count: int) -> None:
    rows = Rows.causal(2, start, count)
    for n in range(count):
        assert visible(rows, n) == set(range(start + n + 1))
        assert rows.slot[n] == rows.pos[n] == start + n and rows.seq[n] == 2
    assert (rows.visible_end() == rows.slot + 1).all()


@settings(deadline=None)  # the machine may be busy
@given(st.integers(0, 20), st.data())
def test_tree_rows_see_their_ancestors(length: int, data: st.DataObject) -> None:
    parents = [data.draw(st.integers(0, i)) for i in range(data.draw(st.integers(0, 63)))]
    rows = Rows.draft_tree(1, length, parents)
    for node in range(len(parents) + 1):
        path, at = [node], node
        while at:
            at = parents[at - 1]
            path.append(at)
        assert visible(rows, node) == set(range(length)) | {length + i for i in path}
        assert rows.pos[node] == length + len(path) - 1 and rows.slot[node] == length + node
        assert rows.visible_end()[node] == max(visible(rows, node)) + 1


def test_bad_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="63"):
        Rows.draft_tree(0, 0, [0] * 64)
    with pytest.raises(ValueError, match="parent 2"):
        Rows.draft_tree(0, 0, [0, 2])
    zeros = np.zeros(2)
    with pytest.raises(ValueError, match=r"Rows\.pos"):
        Rows(zeros, zeros, np.zeros(3), zeros, zeros)


def test_concat_keeps_order_and_marks_accelerated_rows() -> None:
    rows = Rows.concat([Rows.causal(0, 3, 2), Rows.accelerated_at(0, [3, 4]), Rows.causal(1, 0, 1)])
    assert rows.accelerated is not None and rows.accelerated.tolist() == [
        False,
        False,
        True,
        True,
        False,
    ]
    assert rows.slot.tolist() == [3, 4, -1, -1, 0] and rows.prefix.tolist() == [4, 5, 4, 5, 1]
    assert Rows.concat([Rows.causal(0, 0, 1), Rows.causal(0, 1, 1)]).accelerated is None


def filled(batch: int, capacity: int) -> KVCache:
    cache = KVCache(batch, capacity, LAYOUT)
    for store in (cache.keys, cache.values):
        for tensor in store:
            tensor.copy_(torch.randn(tensor.shape))
    cache.positions[:] = np.arange(capacity)
    return cache


@settings(deadline=None)  # the machine may be busy
@given(st.data())
def test_keep_makes_the_listed_slots_contiguous(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 5))
    slots = sorted(data.draw(st.sets(st.integers(length, 11))))
    cache = filled(2, 12)
    cache.commit(1, length)
    before = [t.clone() for t in cache.keys + cache.values]
    positions = cache.positions.copy()
    cache.keep(1, slots)
    order = [*range(length), *slots]
    for old, new in zip(before, cache.keys + cache.values, strict=True):
        assert torch.equal(new[1, :, : len(order)], old[1][:, order])
        assert torch.equal(new[0], old[0])
    assert cache.positions[1, : len(order)].tolist() == positions[1, order].tolist()
    assert cache.lengths == [0, len(order)]


def test_lengths_change_only_within_bounds() -> None:
    cache = filled(1, 6)
    cache.commit(0, 4)
    cache.truncate(0, 2)
    assert cache.lengths == [2]
    for bad in (
        lambda: cache.commit(0, 5),
        lambda: cache.truncate(0, 3),
        lambda: cache.keep(0, [1]),
        lambda: cache.keep(0, [4, 3]),
        lambda: cache.keep(0, [6]),
    ):
        with pytest.raises(ValueError):
            bad()
    assert cache.lengths == [2]


def test_reserve_keeps_contents_and_truncate_moves_nothing() -> None:
    cache = filled(2, 4)
    before = [t.clone() for t in cache.keys + cache.values]
    cache.reserve(9)
    cache.reserve(3)
    assert cache.capacity == 9 and cache.positions.shape == (2, 9)
    for old, new in zip(before, cache.keys + cache.values, strict=True):
        assert new.shape[2] == 9 and torch.equal(new[:, :, :4], old)
    assert cache.nbytes() == 2 * 2 * 2 * 9 * (3 + 4) * 4
    pointers = [t.data_ptr() for t in cache.keys]
    cache.commit(0, 3)
    cache.truncate(0, 0)
    assert pointers == [t.data_ptr() for t in cache.keys]
