"""Tables of what the kernel reads by a row's position: they grow with the texts, so that their size
is that of what is used and not of the context that a configuration claims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from multirate.runtime.native import abi

BLOCK = 1024
"""Positions computed at once, always the same ones together: what stands in a table does not depend
on how it grew.
"""

Kind = str | None
Tables = Mapping[Kind, Mapping[str, Tensor]]
"""By kind of layer, and by field of model.h's Positions: fp32 [n, …] of n positions."""


class PositionTables:
    """compute: positions int64 [n] → their rows of the tables. limit: computed for positions below
    it alone (None: all); the model's angles may change beyond.

    `packed[kind]` is a Positions that keeps its address. Its pointers change in `reach`, so that
    must not be called while the kernel runs over them.
    """

    def __init__(self, compute: Callable[[Tensor], Tables], limit: int | None = None) -> None:
        self._compute, self._limit = compute, limit
        self._tables: dict[tuple[Kind, str], np.ndarray] = {}
        self.packed: dict[Kind, abi.CData] = {}
        self.count = 0
        self.reach(1)

    def reach(self, count: int) -> None:
        """Grows (doubling) to at least so many positions."""
        if count <= self.count:
            return
        count = max(-(-count // BLOCK) * BLOCK, 2 * self.count)
        parts = {key: [table] for key, table in self._tables.items()}
        for start in range(self.count, count, BLOCK):
            for kind, fields in self._block(start).items():
                self.packed.setdefault(kind, abi.new("Positions"))
                for name, rows in fields.items():
                    part = rows.detach().to("cpu", torch.float32).numpy()
                    missing = [(0, BLOCK - len(part)), *[(0, 0)] * (part.ndim - 1)]
                    parts.setdefault((kind, name), []).append(np.pad(part, missing))
        self._tables = {key: np.concatenate(pieces) for key, pieces in parts.items()}
        self.count = count
        for (kind, name), table in self._tables.items():
            setattr(self.packed[kind], name, abi.floats(table))

    def width(self, field: str) -> int:
        """Numbers of one position in a table of this field; 0: there is none."""
        found = (table for (_, name), table in self._tables.items() if name == field)
        return next((table[0].size for table in found), 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return sum(table.nbytes for table in self._tables.values())

    def _block(self, start: int) -> Tables:
        stop = start + BLOCK
        if self._limit is not None:  # at least one row: it says how wide a table is
            stop = max(min(stop, self._limit), 1)
            start = min(start, stop - 1)
        return self._compute(torch.arange(start, stop, device="cpu"))
