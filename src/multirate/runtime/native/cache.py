"""Keys and values in the kernel's layout, with the interface of KVCache."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from multirate.runtime.kv_cache import KVCache, LayerKV
from multirate.runtime.native import abi, library
from multirate.runtime.native.positions import PositionTables
from multirate.runtime.rows import Rows

_BLOCK = 16  # tokens whose K/V lie together


_MAPPED = 32 << 20  # bytes from which on memory is mapped
_NORESERVE = 0x4000  # Linux's flag for mappings larger than the memory, which Python does not name


def _zeros(count: int) -> tuple[Tensor, mmap.mmap | None]:
    """So many zeros, and the mapping that they lie in, if it is one: pages of a mapping take no
    memory until they are written.
    """
    if 2 * count < _MAPPED:
        return torch.zeros(count, dtype=torch.bfloat16, device="cpu"), None
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    mapped = mmap.mmap(-1, 2 * count, flags=flags)
    return torch.frombuffer(mapped, dtype=torch.bfloat16), mapped


def from_native(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """K [B, H, capacity/16, D/2, 16, 2], V [B, H, capacity/2, D, 2] → [B, H, capacity, D] each."""
    return keys.transpose(3, 4).flatten(2, 3).flatten(-2), values.transpose(3, 4).flatten(2, 3)


class NativeKVCache(KVCache):
    """bf16 K/V that the kernel reads at full width; `standard(i)` gives layer i in the usual
    layout.

    Positions equal slots for committed tokens, so the kernel needs no position table; the base
    class's `positions` stays unused.

    Large memory takes pages as they are used (`comes_as_used`).

    tables: what the layers read by position; they grow with the cache. None: the rows' positions
    have another owner.
    """

    comes_as_used = True

    def __init__(
        self,
        batch: int,
        capacity: int,
        layers: Sequence[LayerKV],
        tables: PositionTables | None = None,
    ) -> None:
        self._pointers: abi.CData = None
        self._tables = tables
        self._used = 0  # slots that may have been written since the memory was last cleared
        self._mapped: mmap.mmap | None = None
        super().__init__(batch, capacity, layers)

    def reserve(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        capacity = -(-capacity // _BLOCK) * _BLOCK
        old = list(zip(self.keys, self.values, strict=True)) if self._used else None
        self.keys, self.values = [], []
        sizes = [self.batch * layer.heads * capacity * layer.key_dim for layer in self.layout]
        # One block, not two per layer: its pages come and are cleared at once or, if it is large,
        # as they are used. Zeros: a masked slot enters the weighted sum with weight 0, and 0 · NaN
        # is NaN.
        self._block, self._mapped = _zeros(2 * sum(sizes))
        parts = iter(self._block.split([size for size in sizes for _ in range(2)]))
        for i, layer in enumerate(self.layout):
            shape, dim = (self.batch, layer.heads), layer.key_dim
            keys = next(parts).view(*shape, capacity // 16, dim // 2, 16, 2)
            values = next(parts).view(*shape, capacity // 2, dim, 2)
            if old is not None:  # both layouts are blocks of consecutive slots
                blocks, twos = -(-self._used // _BLOCK), -(-self._used // 2)
                keys[:, :, :blocks] = old[i][0][:, :, :blocks]
                values[:, :, :twos] = old[i][1][:, :, :twos]
            self.keys.append(keys)
            self.values.append(values)
        self.capacity = capacity
        self.version += 1
        pairs = zip(self.keys, self.values, strict=True)
        layers = [abi.new("LayerCache", k=abi.tensor(k), v=abi.tensor(v)) for k, v in pairs]
        self._pointers = abi.array("LayerCache", layers)
        if self._tables is not None:
            self._tables.reach(capacity)

    def reset(self) -> None:
        """As new, in the memory it has."""
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[:, :, : -(-self._used // 16)].zero_()
            values[:, :, : -(-self._used // 2)].zero_()
        self._used = 0
        self.lengths = [0] * self.batch
        self.version += 1

    def trim(self, seq: int) -> None:
        if self._mapped is None:
            return
        begin = abi.address(abi.tensor(self._block))
        for stored in (*self.keys, *self.values):
            part = stored[seq]
            first = abi.address(abi.tensor(part)) - begin
            last = first + part.numel() * part.element_size()
            first, last = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last - last % mmap.PAGESIZE
            if last > first:
                self._mapped.madvise(mmap.MADV_DONTNEED, first, last - first)

    def make_room(self, rows: Rows) -> None:
        """Grows (doubling) when ``rows`` write beyond the capacity; their positions, too, are in
        the tables then.
        """
        self.make_room_to(int(rows.slot.max(initial=-1)))
        if self._tables is not None:
            self._tables.reach(int(rows.pos.max(initial=-1)) + 1)

    def make_room_to(self, last: int) -> None:
        """Grows (doubling) when slot ``last`` is beyond the capacity. No row's position is beyond
        it, either.
        """
        if last >= self.capacity:
            self.reserve(max(last + 1, 2 * self.capacity))
        self._used = max(self._used, last + 1)

    def block_views(self, tokens: int) -> list[Tensor]:
        if tokens != _BLOCK:
            raise ValueError(f"the kernel keeps {_BLOCK} tokens together, not {tokens}")
        return [
            view
            for keys, values in zip(self.keys, self.values, strict=True)
            for view in (keys, values.unflatten(2, (-1, _BLOCK // 2)))
        ]

    def note_restored(self, seq: int, count: int) -> None:
        self.make_room_to(count - 1)

    @property
    def address(self) -> abi.CData:
        return self._pointers

    def standard(self, layer: int) -> tuple[Tensor, Tensor]:
        """Layer's keys and values as [B, H_kv, capacity, D]."""
        return from_native(self.keys[layer], self.values[layer])

    def keep(self, seq: int, slots: Sequence[int]) -> None:
        start = self.lengths[seq]
        if (
            slots
            and list(slots) == list(range(start, start + len(slots)))
            and slots[-1] < self.capacity
        ):
            self.lengths[seq] += len(slots)  # in place already: every chain
            return
        wanted = np.asarray(slots, dtype=np.int32)
        if len(wanted):
            if wanted[0] < start or wanted[-1] >= self.capacity or (np.diff(wanted) <= 0).any():
                raise ValueError(
                    f"slots {list(slots)} to keep must be increasing, >= {start} and in the cache"
                )
            to = np.arange(start, start + len(wanted), dtype=np.int32)
            if wanted[-1] != to[-1]:
                layer = self.layout[0]
                library.kernel().mr_move(
                    self.address,
                    len(self.layout),
                    layer.heads,
                    layer.key_dim,
                    self.capacity,
                    seq,
                    abi.ints(wanted),
                    abi.ints(to),
                    len(wanted),
                )
        self.lengths[seq] += len(wanted)
