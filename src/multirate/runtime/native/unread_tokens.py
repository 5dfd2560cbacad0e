"""Committed tokens of a sequence in the kernel that a branch's own layer has not read."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from multirate.runtime.fused import PendingTokens

_ROOM = 64  # tokens to begin with


class UnreadTokens:
    """Kept in arrays, because adding to them takes a microsecond.

    width: how many numbers are carried for a token; 0: none. window: how many of the newest tokens
    the layer sees; None: all.
    """

    def __init__(self, width: int, window: int | None) -> None:
        self._window, self._count = window, 0
        self._ids = np.empty(_ROOM, np.int64)
        self._carried = np.empty((_ROOM, width), np.float32)

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> NDArray[np.int64]:
        """[len]."""
        return self._ids[: self._count]

    @property
    def carried(self) -> NDArray[np.float32]:
        """[len, width]: what is carried of the token before each."""
        return self._carried[: self._count]

    def add(self, ids: NDArray[np.int64], carried: NDArray[np.float32]) -> None:
        """Tokens [n], and what is carried of those before them [n, any]."""
        begin, end = self._count, self._count + len(ids)
        if end > len(self._ids):
            self._make_room(2 * end)
        self._ids[begin:end] = ids
        if self._carried.shape[1]:
            self._carried[begin:end] = carried
        self._count = end

    def _make_room(self, room: int) -> None:
        for name in ("_ids", "_carried"):
            old = getattr(self, name)
            new = np.empty((room, *old.shape[1:]), old.dtype)
            new[: self._count] = old[: self._count]
            setattr(self, name, new)

    def keep_seen(self) -> None:
        """Drops what the layer will not see. Only before it reads: until then, a conversation may
        continue from any of the tokens.
        """
        window, count = self._window, self._count
        if window is None or count <= window:
            return
        for array in (self._ids, self._carried):
            array[:window] = array[count - window : count].copy()
        self._count = window

    def clear(self) -> None:
        self._count = 0

    def pending(self) -> PendingTokens:
        """The same tokens, copied."""
        width = self._carried.shape[1]
        carried = [torch.from_numpy(self.carried.copy())] if width and self._count else []
        return PendingTokens(self.ids.tolist(), carried)
