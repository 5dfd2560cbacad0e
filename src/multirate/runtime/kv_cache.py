"""Preallocated keys and values with a length per sequence and O(1) rollback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from multirate.runtime.rows import Rows


@dataclass(frozen=True)
class LayerKV:
    """What one layer stores per token: `heads` K/V heads of `key_dim` and `value_dim`."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


class KVCache:
    """K/V of B sequences: `keys[i]`, `values[i]` are [B, H_kv, capacity, D] for layer i.

    `lengths[b]` counts the *committed* tokens of sequence b; rows may write beyond it (drafts).
    Only `commit`, `keep` and `truncate` change it. Stored data is never moved except by `keep` and
    `reserve`. `positions` is a numpy int32 array [B, capacity]: the position each slot was last
    written with.
    """

    comes_as_used: ClassVar[bool] = False
    """Whether slots take memory only when they are written, so that capacity costs nothing."""

    def __init__(self, batch: int, capacity: int, layers: Sequence[LayerKV]) -> None:
        self.layout = tuple(layers)
        self.batch = batch
        self.capacity = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.positions = np.zeros((batch, 0), np.int32)
        self.lengths = [0] * batch
        self.version = 0
        """Grows whenever `positions` or the storage changes, so that masks built from them can be
        reused safely.
        """
        # Zeros rather than empty: a masked slot still enters the attention sum with weight 0, and 0
        # * NaN is NaN.
        self.keys = [
            torch.zeros(batch, k.heads, 0, k.key_dim, dtype=k.dtype, device=k.device)
            for k in self.layout
        ]
        self.values = [
            torch.zeros(batch, k.heads, 0, k.value_dim, dtype=k.dtype, device=k.device)
            for k in self.layout
        ]
        self.reserve(capacity)

    def reserve(self, capacity: int) -> None:
        """Makes room for `capacity` slots per sequence; never shrinks. Existing slots keep their
        contents.
        """
        if capacity <= self.capacity:
            return
        for store in (self.keys, self.values):
            for i, old in enumerate(store):
                new = old.new_zeros(self.batch, old.shape[1], capacity, old.shape[3])
                new[:, :, : self.capacity] = old
                store[i] = new
        positions = np.zeros((self.batch, capacity), np.int32)
        positions[:, : self.capacity] = self.positions
        self.positions, self.capacity = positions, capacity
        self.version += 1

    def note_positions(self, rows: Rows) -> None:
        """Records the positions of the slots `rows` write; grows the cache (doubling) when they do
        not fit.

        Every decoder calls it before writing. Raises ValueError for a sequence that the cache does
        not have.
        """
        if not len(rows):
            return
        if rows.seq.min() < 0 or rows.seq.max() >= self.batch:
            raise ValueError(f"rows name sequence {rows.seq.max()} of {self.batch}")
        last = int(rows.slot.max())
        if last >= self.capacity:
            self.reserve(max(last + 1, 2 * self.capacity))
        writes = rows.slot >= 0
        seq, slot, pos = rows.seq[writes], rows.slot[writes], rows.pos[writes]
        if not np.array_equal(self.positions[seq, slot], pos):
            self.positions[seq, slot] = pos
            self.version += 1

    def commit(self, seq: int, count: int) -> None:
        """Counts the `count` slots after the committed ones as committed."""
        if count < 0 or self.lengths[seq] + count > self.capacity:
            raise ValueError(
                f"cannot commit {count} slots after {self.lengths[seq]} of {self.capacity}"
            )
        self.lengths[seq] += count

    def truncate(self, seq: int, length: int) -> None:
        """Forgets everything of sequence `seq` beyond its first `length` committed tokens. O(1)."""
        if not 0 <= length <= self.lengths[seq]:
            raise ValueError(
                f"cannot truncate sequence {seq} of {self.lengths[seq]} tokens to {length}"
            )
        self.lengths[seq] = length

    def keep(self, seq: int, slots: Sequence[int]) -> None:
        """Makes the listed uncommitted slots (an accepted tree path) contiguous after the committed
        ones; commits them.

        `slots` are strictly increasing and >= the committed length.
        """
        start = self.lengths[seq]
        wanted = list(slots)
        increasing = all(a < b for a, b in zip([start - 1, *wanted], wanted, strict=False))
        if not increasing or (wanted and wanted[-1] >= self.capacity):
            raise ValueError(
                f"slots {wanted} to keep must be increasing, uncommitted (>= {start}) and in the "
                "cache"
            )
        # Leading slots that already sit in place (a chain: all of them) need no copy.
        done = 0
        while done < len(wanted) and wanted[done] == start + done:
            done += 1
        if done < len(wanted):
            self._move(seq, wanted[done:], start + done)
            to = slice(start + done, start + len(wanted))
            self.positions[seq, to] = self.positions[seq, wanted[done:]]
            self.version += 1
        self.lengths[seq] += len(wanted)

    def _move(self, seq: int, slots: Sequence[int], start: int) -> None:
        """Copies K/V of `slots` of a sequence to the slots from `start` on."""
        to = slice(start, start + len(slots))
        for store in (self.keys, self.values):
            for tensor in store:
                index = torch.tensor(slots, device=tensor.device, dtype=torch.int64)
                tensor[seq, :, to] = tensor[seq].index_select(1, index)

    def block_views(self, tokens: int) -> list[Tensor]:
        """The keys and values of each layer in blocks of so many tokens, [B, H_kv, blocks, …] each,
        over the memory itself. Slots after the last whole block are left out.
        """
        blocks = self.capacity // tokens
        return [
            kept[:, :, : blocks * tokens].unflatten(2, (blocks, tokens))
            for pair in zip(self.keys, self.values, strict=True)
            for kept in pair
        ]

    def note_restored(self, seq: int, count: int) -> None:
        """The first `count` slots of a sequence have been written through `block_views`."""
        self.positions[seq, :count] = np.arange(count, dtype=np.int32)
        self.version += 1

    def trim(self, seq: int) -> None:
        """Gives memory of a sequence without tokens back to the system, where that is possible."""

    def standard(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [B, H_kv, capacity, D] each, whatever layout they are
        stored in.
        """
        return self.keys[layer], self.values[layer]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return sum(k.heads * (k.key_dim + k.value_dim) * k.dtype.itemsize for k in self.layout)

    def nbytes(self) -> int:
        """Bytes of the allocated keys and values."""
        return sum(
            t.numel() * t.element_size() for store in (self.keys, self.values) for t in store
        )
