"""A KVCache that captured graphs may refer to: its storage keeps its address and size, and has a
scratch slot that is never read.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multirate.runtime.kv_cache import KVCache, LayerKV
from multirate.runtime.rows import MAX_TREE_BIT
from multirate.runtime.transfer import to_device

SPAN = 256
"""Slots by which the attended part of a storage is rounded up."""
LEAST_CAPACITY = 1024
"""Slots of a storage, of each sequence."""


def round_up(slots: int) -> int:
    """The next multiple of SPAN."""
    return -(-slots // SPAN) * SPAN


def storage_capacity(slots: int) -> int:
    """Slots that a storage gets: a power of two, so that prompts of many lengths share one and what
    was captured over it (on an H200 with a slow processor 0.2 s a capture).
    """
    return max(LEAST_CAPACITY, 1 << (slots - 1).bit_length())


def seen_slots(prefix: Tensor, tree: Tensor, span: int) -> Tensor:
    """bool [..., span] of int64 [...]: the slots below each prefix, and those that the bits of tree
    say (Rows), found on the device.
    """
    k = torch.arange(span, device=prefix.device) - prefix[..., None]
    bit = (tree[..., None] >> k.clamp(0, MAX_TREE_BIT)) & 1
    return (k < 0) | (bit.bool() & (k <= MAX_TREE_BIT))


class StaticStorage:
    """K/V tensors `keys[i]`, `values[i]`: [B, H_kv, capacity + 1, D]; the last slot, `scratch`, is
    only written.

    blocks: all of these by shape, [count, B, H_kv, capacity + 1, D] each, so that an accepted path
    moves in all layers at once. What was captured over these tensors is kept beside them, so that
    it goes when they go. user: the cache over it, weakly; None before there is one, and once it was
    released.
    """

    def __init__(self, batch: int, capacity: int, layout: Sequence[LayerKV]) -> None:
        self.batch, self.capacity, self.scratch = batch, capacity, capacity
        kinds = [
            (batch, k.heads, capacity + 1, size, k.dtype, k.device)
            for k in layout
            for size in (k.key_dim, k.value_dim)
        ]
        self.blocks = {
            kind: torch.zeros(count, *kind[:4], dtype=kind[4], device=kind[5])
            for kind, count in Counter(kinds).items()
        }
        unused = {kind: iter(block.unbind()) for kind, block in self.blocks.items()}
        tensors = [next(unused[kind]) for kind in kinds]
        self.keys, self.values = tensors[::2], tensors[1::2]
        self.captures: OrderedDict[Hashable, Any] = OrderedDict()
        self.inputs = weakref.WeakValueDictionary[Hashable, Any]()
        self.user: weakref.ref[StaticKVCache] | None = None

    @property
    def free(self) -> bool:
        """Whether nobody reads it any more: its cache is gone, was released or has grown out of
        it.
        """
        cache = None if self.user is None else self.user()
        return cache is None or cache.storage is not self


class StaticKVCache(KVCache):
    """A KVCache over a StaticStorage: the capacity is a power of two; growing takes a new storage.

    kept: the storage of a dropped cache of the same batch and layout. Used (emptied) when large
    enough, and then what was captured over it stays valid.
    """

    storage: StaticStorage

    def __init__(
        self,
        batch: int,
        capacity: int,
        layers: Sequence[LayerKV],
        kept: StaticStorage | None = None,
    ) -> None:
        self._kept = kept
        super().__init__(batch, max(capacity, 1), layers)
        self._kept = None

    def reserve(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        kept = self._kept
        if kept is not None and kept.batch == self.batch and kept.capacity >= capacity:
            storage = kept
            for tensor in kept.keys + kept.values:
                tensor.zero_()
        else:
            storage = StaticStorage(self.batch, storage_capacity(capacity), self.layout)
        for new, old in zip(storage.keys + storage.values, self.keys + self.values, strict=True):
            new[:, :, : self.capacity] = old
        positions = np.zeros((self.batch, storage.capacity), np.int32)
        positions[:, : self.capacity] = self.positions
        self.storage, self.positions, self.capacity = storage, positions, storage.capacity
        storage.user = weakref.ref(self)
        self.keys = [k[:, :, : self.capacity] for k in storage.keys]
        self.values = [v[:, :, : self.capacity] for v in storage.values]
        self.version += 1

    def _move(self, seq: int, slots: Sequence[int], start: int) -> None:
        stop = start + len(slots)
        for block in self.storage.blocks.values():
            index = to_device(np.array(slots, np.int64), block.device)
            block[:, seq, :, start:stop] = block[:, seq].index_select(2, index)
