"""Reads of the store that leave the page cache alone: O_DIRECT into aligned memory, a chunk at a
time.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from multirate.errors import UserError
from multirate.experts.layout import ALIGNMENT
from multirate.runtime.native import abi
from multirate.runtime.native.packing import HUGE_PAGE, large_pages


class Arena:
    """Page-aligned memory for `count` records of `size` bytes, a multiple of ALIGNMENT. `slots[i]`:
    [size] uint8.
    """

    def __init__(self, count: int, size: int) -> None:
        # A direct read names its pages one by one: of large ones it has few. Whole ones, from where
        # one begins: else slots of less than 2 MB in all have none, and are read at half the speed.
        room = -(-max(count * size, ALIGNMENT) // HUGE_PAGE) * HUGE_PAGE
        self._memory = large_pages(room + HUGE_PAGE)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        first = -abi.address(abi.tensor(whole)) % HUGE_PAGE
        self.slots: list[Tensor] = [
            whole[first + i * size : first + (i + 1) * size] for i in range(count)
        ]
        view = memoryview(self._memory)
        self.buffers = [view[first + i * size : first + (i + 1) * size] for i in range(count)]


class Throttle:
    """At most `bytes_per_second` over all readers, so that measurements repeat on any disk; None:
    no limit.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self.rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def taking(self, size: int) -> Iterator[None]:
        """Around the reading of `size` bytes; sleeps at its end until a disk of the set speed would
        have read them.
        """
        began = time.perf_counter()
        yield
        if self.rate is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, began) + size / self.rate
            until = self._free_at
        if (wait := until - time.perf_counter()) > 0:
            time.sleep(wait)


def _read_into(descriptor: int, into: memoryview, offset: int) -> int:
    """How many bytes have been read. Raises OSError."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [into], offset)
    found = os.pread(descriptor, len(into), offset)  # macOS
    into[: len(found)] = found
    return len(found)


class RecordReader:
    """Reads of one data file. `direct`: whether the page cache is bypassed; if not, `note` says
    why.

    Safe to use from several threads. Raises OSError when a read fails or ends early.
    """

    def __init__(self, path: Path, throttle: Throttle | None = None, direct: bool = True) -> None:
        self.path, self._throttle = path, throttle or Throttle(None)
        self.direct, self.note = False, "O_DIRECT was switched off" if not direct else None
        self._fd = -1
        if direct and hasattr(os, "O_DIRECT"):
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
                self._probe()
                self.direct = True
            except OSError as error:
                self._close_fd()
                self.note = (
                    f"cannot read {path} with O_DIRECT ({error.strerror}); reads go through the "
                    "page cache"
                )
        elif direct:
            self.note = "this system has no O_DIRECT; reads go through the page cache"
        if self._fd < 0:
            try:
                self._fd = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise UserError(
                    f"cannot open {path}: {(error.strerror or str(error)).lower()}"
                ) from None

    def _probe(self) -> None:
        with mmap.mmap(-1, ALIGNMENT) as page:
            _read_into(self._fd, memoryview(page), 0)

    def read(self, offset: int, into: memoryview) -> None:
        """Fills `into` (aligned) from `offset`."""
        with self._throttle.taking(len(into)):
            self._fill(offset, into)

    def _fill(self, offset: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            count, before = _read_into(self._fd, into[done:], offset + done), done
            done += count
            if count > 0 and done < len(into) and self.direct:
                done -= done % ALIGNMENT  # a short direct read is resumed where it may be
            if done == before:
                raise OSError(
                    f"{self.path} ends at byte {offset + done + count}: it was truncated while in "
                    "use"
                )
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, len(into), os.POSIX_FADV_DONTNEED)

    @property
    def fileno(self) -> int:
        """The open file."""
        return self._fd

    @property
    def rate(self) -> float | None:
        """Bytes a second at most."""
        return self._throttle.rate

    def _close_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """No reads after this."""
        self._close_fd()
