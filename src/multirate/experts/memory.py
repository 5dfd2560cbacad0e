"""Where slots are and what fills them: RAM from the store's file, or a GPU's memory from pinned
RAM.

On a GPU: the store is read into pinned host memory once; records then go to the device on a copy
stream of their own. A slot is READY when its copy has ended on the device, so computing need not
wait for an event; it is overwritten only behind the event that ends the last compute with it,
because that compute runs after the Python that asked for it. Not run on a GPU yet: the
order of copies and events is tested on CPU with a recorder, its speed is unmeasured.
"""

from __future__ import annotations

import contextlib
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from multirate.errors import UserError
from multirate.experts.layout import ALIGNMENT
from multirate.experts.loader import unreadable
from multirate.experts.reader import Arena, RecordReader, Throttle
from multirate.experts.reads import CHUNK, NativeReads, Reads, ThreadReads, reason
from multirate.experts.store import ExpertStore
from multirate.runtime.native import library

_SPIN = 1e-3  # longer than a layer of a small model computes


class SlotMemory(ABC):
    """`slots[i]`: [record bytes] uint8 on the device that computes. note: what the user should know
    about it, or None.

    `fill` may be called from several threads, for different slots.
    """

    store: ExpertStore
    slots: list[Tensor]
    note: str | None = None

    @abstractmethod
    def fill(self, slot: int, offset: int, begin: int, end: int) -> None:
        """Fill bytes [begin, end) of a slot's record at `offset`. Raises OSError."""

    def reads(self, threads: int | None) -> Reads:
        """What fills the slots. threads: 0: the system alone; None: as suits."""
        return ThreadReads(self.fill, self.store.index.record.bytes, threads or 1, CHUNK)

    def intact(self, key: tuple[int, int], slot: int) -> bool:
        """Whether the record that has been read into a slot is what was packed."""
        return True

    def used(self, slots: Iterable[int]) -> None:  # noqa: B027 - optional
        """Computing with these has been asked of the device, and may still be under way."""

    def close(self) -> None:  # noqa: B027 - optional
        """No fills after this."""


class HostMemory(SlotMemory):
    """Aligned RAM, filled from the data file past the page cache."""

    def __init__(
        self, store: ExpertStore, count: int, throttle: Throttle | None = None, direct: bool = True
    ) -> None:
        self.store = store
        self._arena = Arena(count, store.index.record.bytes)
        self.slots = self._arena.slots
        self.reader = RecordReader(store.path, throttle, direct)
        self.note = self.reader.note

    def reads(self, threads: int | None) -> Reads:
        if not self.reader.direct:  # the kernel's threads would not tell the page cache to forget
            return super().reads(threads)
        try:
            library.kernel()
        except library.NativeUnavailable:
            return super().reads(threads)
        if not threads and (threads == 0 or self.store.index.record.bytes <= CHUNK):
            with contextlib.suppress(
                OSError
            ):  # larger ones need somebody to go on with while a layer computes
                return self._native(0)
        return self._native(threads or 1)

    def _native(self, threads: int) -> Reads:
        idle = (os.cpu_count() or 1) - torch.get_num_threads()  # cores that computing leaves
        return NativeReads(
            self.reader.fileno,
            self.slots[0],
            len(self.slots),
            self.store.index.record.bytes,
            self.reader.rate,
            threads,
            CHUNK,
            ALIGNMENT,
            _SPIN if idle >= threads else 0.0,
        )

    def fill(self, slot: int, offset: int, begin: int, end: int) -> None:
        self.reader.read(offset + begin, self._arena.buffers[slot][begin:end])

    def intact(self, key: tuple[int, int], slot: int) -> bool:
        return self.store.intact(*key, self.slots[slot])

    def close(self) -> None:
        self.reader.close()


class CudaCopies:
    """A copy stream of a CUDA device; events are what `mark` gives."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def allocate(self, size: int) -> Tensor:
        """[size] uint8 on the device."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def pinned(self, size: int) -> Tensor:
        """Pinned host memory [size] uint8. Raises RuntimeError if there is none."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")

    def mark(self) -> Any:
        """An event behind everything that has been asked of the computing stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def copy(self, to: Tensor, source: Tensor, after: Any | None) -> None:
        """Copies on the copy stream behind the event `after`; returns when it is done."""
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            done = self._stream.record_event()
        done.synchronize()  # this reader's thread waits, the computing one does not


class DeviceMemory(SlotMemory):
    """Slots on a device, filled from pinned host memory that holds the whole store."""

    def __init__(
        self,
        store: ExpertStore,
        count: int,
        copies: CudaCopies,
        throttle: Throttle | None = None,
        direct: bool = True,
    ) -> None:
        self.store, size = store, store.index.record.bytes
        self._copies, self._throttle = copies, throttle or Throttle(None)
        try:
            self._records = copies.pinned(store.index.data_bytes)
        except RuntimeError as error:
            raise UserError(
                f"cannot allocate the {store.index.data_bytes} bytes of pinned host memory that "
                f"{store.path} needs: {str(error).splitlines()[0]}"
            ) from None
        self._read(store, direct)
        whole = copies.allocate(count * size)
        self.slots = [whole[i * size : (i + 1) * size] for i in range(count)]
        self._last: list[Any | None] = [None] * count

    def _read(self, store: ExpertStore, direct: bool) -> None:
        reader = RecordReader(store.path, direct=direct)
        staging, total = Arena(1, CHUNK), store.index.data_bytes
        try:
            for at in range(0, total, CHUNK):
                take = min(CHUNK, total - at)
                reader.read(at, staging.buffers[0][:take])
                self._records[at : at + take] = staging.slots[0][:take]
            for number in range(len(store.index.checksums)):
                row, expert = divmod(number, store.index.num_experts)
                at = store.offset(row, expert)
                if not store.intact(row, expert, self._records[at : at + store.index.record.bytes]):
                    raise unreadable(store, (row, expert), reason(errno.EBADMSG))
        except OSError as error:
            raise UserError(f"cannot read {store.path}: {error.strerror or error}") from None
        finally:
            reader.close()

    def fill(self, slot: int, offset: int, begin: int, end: int) -> None:
        source = self._records[offset + begin : offset + end]
        with self._throttle.taking(end - begin):
            self._copies.copy(self.slots[slot][begin:end], source, self._last[slot])

    def used(self, slots: Iterable[int]) -> None:
        event = self._copies.mark()
        for slot in slots:
            self._last[slot] = event
