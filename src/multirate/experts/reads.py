"""Reads of records into slots, done by other threads: what the loader asks of them, and two ways to
do it.

One read per slot at a time. Demands go first, in their order; then predictions, the lowest `order`
first. A prediction gives way to a demand between two chunks and goes on afterwards. Everything here
is called from one thread.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from multirate.errors import UserError
from multirate.runtime.native import abi, library

CHUNK = 1 << 20
Fill = Callable[[int, int, int, int], None]
"""(slot, offset of the record, begin, end): brings bytes [begin, end) of the record; raises
OSError.
"""


@dataclass
class Ended:
    """A read that is over. error: an errno, 0 (the slot is whole) or ECANCELED; began, ended:
    perf_counter.
    """

    slot: int
    error: int
    bytes: int
    began: float
    ended: float
    message: str = ""


def reason(error: int) -> str:
    """Of a failed read, in words."""
    if error == errno.EBADMSG:
        return (
            "its checksum differs from the one stored when it was packed; the file is "
            "damaged, pack it again"
        )
    return "it was truncated while in use" if error == errno.ENODATA else os.strerror(error)


class Reads(ABC):
    """See the module."""

    @abstractmethod
    def submit(self, slot: int, offset: int, order: int, demanded: bool) -> None:
        """The record at `offset` → the slot, which has no read."""

    @abstractmethod
    def promote(self, slot: int) -> None:
        """A prediction that is demanded now."""

    @abstractmethod
    def cancel(self, slot: int) -> bool:
        """True: it will not be read, and the slot may be filled with something else. False: it is
        being read or has ended; `ended` will tell, as ECANCELED if that was between two chunks.
        """

    @abstractmethod
    def ended(self, patience: float = 0.0) -> list[Ended]:
        """What has ended since the last call, after waiting up to `patience` seconds for something
        to.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the threads; reads under way end with their chunk."""


class NativeReads(Reads):
    """In the kernel's library: by its own threads (no interpreter lock between a read that ends and
    the next one), or with threads = 0 by the system, asked from this thread (Linux, files opened
    with O_DIRECT).
    """

    def __init__(
        self,
        fd: int,
        memory: Tensor,
        slots: int,
        size: int,
        rate: float | None,
        threads: int,
        chunk: int,
        alignment: int,
        spin: float = 0.0,
    ) -> None:
        """memory: the first slot; the others lie behind it. spin: seconds that a reader looks for
        work before it sleeps, where it has a core of its own. Raises OSError where threads is 0
        and the system cannot read by itself.
        """
        self._library = library.kernel()
        self._handle: abi.CData | None = self._library.mr_reads_open(
            fd, abi.tensor(memory), slots, size, chunk, alignment, rate or 0.0, threads, spin
        )
        if not self._handle and not threads:
            raise OSError(errno.ENOSYS, "the system has no asynchronous reads left")
        if not self._handle:
            raise UserError(
                f"cannot start {threads} reader threads: the system has no more threads or memory"
            )
        self._found = abi.ffi.new("EndedRead[]", slots)

    @property
    def handle(self) -> abi.CData:
        """The kernel's own. Raises ValueError after `close`."""
        if self._handle is None:
            raise ValueError("the reads are closed")
        return self._handle

    def submit(self, slot: int, offset: int, order: int, demanded: bool) -> None:
        self._library.mr_reads_submit(self._handle, slot, offset, order, demanded)

    def promote(self, slot: int) -> None:
        self._library.mr_reads_promote(self._handle, slot)

    def cancel(self, slot: int) -> bool:
        return bool(self._library.mr_reads_cancel(self._handle, slot))

    def ended(self, patience: float = 0.0) -> list[Ended]:
        if self._handle is None:
            return []
        count = self._library.mr_reads_ended(self._handle, patience, self._found)
        return [
            Ended(
                one.slot,
                one.status,
                one.bytes,
                one.began,
                one.ended,
                message=reason(one.status) if one.status else "",
            )
            for one in self._found[0:count]
        ]

    def close(self) -> None:
        if self._handle is not None:
            self._library.mr_reads_close(self._handle)
            self._handle = None


@dataclass
class _Read:
    slot: int
    offset: int
    key: tuple[bool, int]  # (not demanded, order)
    done: int = 0
    began: float = 0.0
    unwanted: bool = False


class ThreadReads(Reads):
    """The same with Python's threads around any `fill`: for slots on a device, and where the kernel
    cannot be built.
    """

    def __init__(self, fill: Fill, size: int, threads: int, chunk: int = CHUNK) -> None:
        self._fill, self._size, self._chunk = fill, size, chunk
        self._queue: list[_Read] = []
        self._reads: dict[int, _Read] = {}
        self._over: list[Ended] = []
        self._sequence = 0
        self._closed = False
        self._lock = threading.Lock()
        self._work, self._finished = (
            threading.Condition(self._lock),
            threading.Condition(self._lock),
        )
        self._threads = [
            threading.Thread(target=self._run, daemon=True, name=f"experts-{i}")
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, slot: int, offset: int, order: int, demanded: bool) -> None:
        with self._lock:
            self._sequence += 1
            read = self._reads[slot] = _Read(
                slot, offset, (not demanded, self._sequence if demanded else order)
            )
            self._queue.append(read)
            self._work.notify()

    def promote(self, slot: int) -> None:
        with self._lock:
            read = self._reads.get(slot)
            if read is not None:
                self._sequence += 1
                read.key, read.unwanted = (False, self._sequence), False

    def cancel(self, slot: int) -> bool:
        with self._lock:
            read = self._reads.get(slot)
            if read is None:
                return False
            read.unwanted = True
            if read not in self._queue:
                return False
            self._queue.remove(read)
            del self._reads[slot]
            return True

    def ended(self, patience: float = 0.0) -> list[Ended]:
        with self._lock:
            if not self._over and patience:
                self._finished.wait(patience)
            found, self._over = self._over, []
            return found

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._closed:
                    self._work.wait()
                if self._closed:
                    return
                read = min(self._queue, key=lambda one: one.key)
                self._queue.remove(read)
            self._read(read)

    def _read(self, read: _Read) -> None:
        read.began = read.began or time.perf_counter()
        while True:
            end, error, message = min(read.done + self._chunk, self._size), 0, ""
            try:
                self._fill(read.slot, read.offset, read.done, end)
            except OSError as problem:
                error, message, end = (
                    problem.errno or errno.EIO,
                    problem.strerror or str(problem),
                    read.done,
                )
            with self._lock:
                read.done = end
                if not error and end < self._size:
                    if self._closed:
                        return
                    if not read.unwanted:
                        if read.key[0] and any(not other.key[0] for other in self._queue):
                            self._queue.append(read)  # gives way; goes on from here later
                            self._work.notify()
                            return
                        continue
                    error = errno.ECANCELED
                del self._reads[read.slot]
                self._over.append(
                    Ended(read.slot, error, end, read.began, time.perf_counter(), message)
                )
                self._finished.notify()
                return
