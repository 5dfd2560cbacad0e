"""Turns flat rows into the padded batch that a transformers layer takes: where rows
sit, write and look.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multirate.runtime.hf.parts import additive
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import MAX_TREE_BIT, Rows


class RowPlan:
    """How the N rows of one call become a batch [B', T]; built once per call, reused while the
    cache is unchanged.

    B' are the sequences between the smallest and the largest of the call (so that K/V are plain
    views of the cache), or only those that occur when most of that range does not. T is the largest
    number of rows of one sequence; gaps are padding rows that write nothing and see nothing.
    """

    def __init__(
        self,
        rows: Rows,
        cache: KVCache,
        device: torch.device,
        dtype: torch.dtype,
        fused_causal: bool,
    ) -> None:
        cache.note_positions(rows)
        # Weak: a plan kept for reuse must not keep a dropped cache's memory.
        self.rows, self._cache, self.version = rows, weakref.ref(cache), cache.version
        self.device, self.dtype, self.fused_causal = device, dtype, fused_causal
        n = len(rows)
        first, last = int(rows.seq.min()), int(rows.seq.max())
        self.end = max(int(rows.visible_end().max()), 1)
        if self.end > cache.capacity:
            raise ValueError(f"rows look at {self.end} slots; the cache has {cache.capacity}")
        if first == last:
            # [0] * N and 0..N-1: the usual case costs no sorting.
            b, t = np.zeros(n, np.int64), np.arange(n)
            self.shape = (1, n)
            self.in_order = True
            self.sequences: slice | Tensor = slice(first, first + 1)
        else:
            b, t = self._scatter(rows, first, last)
        self.b, self.t = b, t
        if not self.in_order:
            self.at = torch.from_numpy(b * self.shape[1] + t).to(device)
        self._plan_writes()
        self.position_ids = self._padded(rows.pos, np.int64)
        self.max_position = int(rows.pos.max())
        self._masks: dict[int | None, Tensor | None] = {}
        self.rotary: Any = None
        self.accelerated: Tensor | None = None
        if rows.accelerated is not None and rows.accelerated.any():
            flat = (b * self.shape[1] + t)[rows.accelerated]
            self.accelerated = torch.from_numpy(flat).to(device)

    def current(self, rows: Rows, cache: KVCache) -> bool:
        return self.rows is rows and self._cache() is cache and self.version == cache.version

    @property
    def cache(self) -> KVCache:
        cache = self._cache()
        assert cache is not None  # the caller of `layers` holds it
        return cache

    def _scatter(self, rows: Rows, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        present, b, counts = np.unique(rows.seq, return_inverse=True, return_counts=True)
        span = last - first + 1
        if span <= 2 * len(present):
            b = (rows.seq - first).astype(np.int64)
            self.sequences = slice(first, last + 1)
        else:
            span = len(present)
            # Rare: copying the K/V of the few sequences left beats attending for all that have
            # ended.
            self.sequences = torch.from_numpy(present.astype(np.int64))
        order = np.argsort(rows.seq, kind="stable")
        starts = np.cumsum(counts) - counts
        t = np.empty(len(rows), np.int64)
        t[order] = np.arange(len(rows)) - np.repeat(starts, counts)
        self.shape = (span, int(counts.max()))
        full = span * self.shape[1] == len(rows)
        self.in_order = full and bool((b * self.shape[1] + t == np.arange(len(rows))).all())
        return b, t

    def _padded(self, values: np.ndarray, dtype: type) -> Tensor:
        """[N] → [B', T] on the device, 0 in padding."""
        if self.in_order:
            grid: np.ndarray = values.astype(dtype).reshape(self.shape)
        else:
            grid = np.zeros(self.shape, dtype=dtype)
            grid[self.b, self.t] = values
        return torch.from_numpy(grid).to(self.device)

    def _plan_writes(self) -> None:
        rows, (writing,) = self.rows, np.nonzero(self.rows.slot >= 0)
        self.writes = len(writing) > 0
        self.block: tuple[int, slice, slice] | None = None
        if not self.writes:
            return
        slots = rows.slot[writing]
        count = len(writing)
        contiguous = int(writing[-1]) - int(writing[0]) == count - 1 and bool(
            (np.diff(slots) == 1).all()
        )
        if isinstance(self.sequences, slice) and self.shape[0] == 1 and contiguous:
            where = slice(int(slots[0]), int(slots[0]) + count)
            self.block = (self.sequences.start, slice(int(writing[0]), int(writing[-1]) + 1), where)
            return
        index: list[np.ndarray] = [self.b[writing], self.t[writing], rows.seq[writing], slots]
        self.write_index = [torch.from_numpy(a.astype(np.int64)).to(self.device) for a in index]

    # -- what the layers call ----------------------------------------------------------------------

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """The cache protocol of transformers' attention: writes [B', H, T, D], returns views [B',
        H, end, D].
        """
        keys, values = self.cache.keys[layer_idx], self.cache.values[layer_idx]
        if self.block is not None:
            seq, where, slots = self.block
            keys[seq, :, slots] = key[0, :, where]
            values[seq, :, slots] = value[0, :, where]
        elif self.writes:
            b, t, seq_index, slot_index = self.write_index
            keys[seq_index, :, slot_index] = key[b, :, t]
            values[seq_index, :, slot_index] = value[b, :, t]
        if isinstance(self.sequences, slice):
            return keys[self.sequences, :, : self.end], values[self.sequences, :, : self.end]
        index = self.sequences.to(keys.device)
        return keys[:, :, : self.end].index_select(0, index), values[:, :, : self.end].index_select(
            0, index
        )

    def pad(self, x: Tensor) -> Tensor:
        """[N, d] → [B', T, d]."""
        if self.in_order:
            return x.reshape(*self.shape, x.shape[-1])
        grid = x.new_zeros(self.shape[0] * self.shape[1], x.shape[-1])
        return grid.index_copy_(0, self.at, x).view(*self.shape, x.shape[-1])

    def unpad(self, x: Tensor) -> Tensor:
        """[B', T, d] → [N, d]."""
        flat = x.reshape(-1, x.shape[-1])
        return flat if self.in_order else flat.index_select(0, self.at)

    def mask(self, window: int | None) -> Tensor | None:
        """The additive mask [B', 1, T, end] of a layer with this window; None where none is
        needed.
        """
        key = window if window is not None and window <= self.max_position else None
        if key not in self._masks:
            self._masks[key] = None if key is None and self._unmasked() else self._build(key)
        return self._masks[key]

    def _unmasked(self) -> bool:
        rows = self.rows
        if not self.in_order or rows.tree.any():
            return False
        if self.shape[1] == 1:
            return bool((rows.prefix == self.end).all())
        causal_prompt = self.shape[0] == 1 and len(rows) == self.end and rows.prefix[0] == 1
        return self.fused_causal and bool(causal_prompt) and bool((np.diff(rows.prefix) == 1).all())

    def _build(self, window: int | None) -> Tensor:
        prefix = self._padded(self.rows.prefix, np.int64)[:, :, None]
        slots = torch.arange(self.end, device=self.device)
        seen = slots < prefix
        if self.rows.tree.any():
            tree = self._padded(self.rows.tree, np.int64)[:, :, None]
            k = slots - prefix
            bit = (tree >> k.clamp(0, MAX_TREE_BIT)) & 1
            seen = seen | (bit.bool() & (k >= 0) & (k <= MAX_TREE_BIT))
        if window is not None:
            stored = self.cache.positions[:, : self.end]
            chosen: np.ndarray = stored[
                self.sequences if isinstance(self.sequences, slice) else self.sequences.numpy()
            ]
            positions = torch.from_numpy(chosen.astype(np.int64)).to(self.device)[:, None, :]
            seen = seen & (positions > self.position_ids[:, :, None] - window)
        return additive(seen[:, None], self.dtype)
