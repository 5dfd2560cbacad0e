"""Rows: for each of the N rows of a forward call, its token's place, where it writes, and what it
may see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_TREE_BIT = 62
"""Highest usable bit of `Rows.tree`: an int64 keeps its sign bit free."""


@dataclass(frozen=True, eq=False)
class Rows:
    """N rows of a forward call, as parallel numpy arrays of length N. Treat them as immutable.

    Every row writes its K/V before any row attends. A causal row at slot s has `prefix = s + 1,
    tree = 0`. An adapter row of the token at slot s only reads: `slot = -1, pos = s, prefix = s +
    1`.
    """

    seq: NDArray[np.int32]
    """Sequence of the cache."""
    slot: NDArray[np.int32]
    """Cache slot for its keys and values; -1 writes nothing."""
    pos: NDArray[np.int32]
    """Rotary or learned position."""
    prefix: NDArray[np.int32]
    """The row sees slots [0, prefix) of its sequence …"""
    tree: NDArray[np.int64]
    """… and slot prefix + k for every set bit k <= 62: its tree ancestors and itself."""
    accelerated: NDArray[np.bool_] | None = None
    """Adapter rows (of the accelerated stream); None: no row is."""

    def __post_init__(self) -> None:
        types = {
            "seq": np.int32,
            "slot": np.int32,
            "pos": np.int32,
            "prefix": np.int32,
            "tree": np.int64,
        }
        for name, dtype in types.items():
            array = np.ascontiguousarray(getattr(self, name), dtype=dtype)
            if array.ndim != 1 or len(array) != len(self.seq):
                raise ValueError(
                    f"Rows.{name} has shape {array.shape}; a vector of length {len(self.seq)} is "
                    "needed"
                )
            object.__setattr__(self, name, array)
        if self.accelerated is not None:
            mask = np.ascontiguousarray(self.accelerated, dtype=np.bool_)
            if mask.shape != self.seq.shape:
                raise ValueError(
                    f"Rows.accelerated has shape {mask.shape}; {self.seq.shape} is needed"
                )
            object.__setattr__(self, "accelerated", mask)

    def __len__(self) -> int:
        return len(self.seq)

    @classmethod
    def causal(cls, seq: int, start: int, count: int) -> Rows:
        """`count` consecutive tokens of one sequence at slots = positions `start, start + 1,
        ...`.
        """
        slot = np.arange(start, start + count, dtype=np.int32)
        rows = object.__new__(
            cls
        )  # a few per decoded token: the checks of __post_init__ hold by construction
        fields_of = rows.__dict__
        fields_of["seq"], fields_of["slot"], fields_of["pos"] = (
            np.full(count, seq, np.int32),
            slot,
            slot,
        )
        fields_of["prefix"], fields_of["tree"] = slot + np.int32(1), np.zeros(count, np.int64)
        fields_of["accelerated"] = None
        return rows

    @classmethod
    def accelerated_at(cls, seq: int, slots: ArrayLike) -> Rows:
        """Adapter rows of the causal tokens at `slots`: they read the slow K/V up to and including
        their token.
        """
        pos = np.atleast_1d(np.asarray(slots, dtype=np.int32))
        n = len(pos)
        return cls(
            np.full(n, seq, np.int32),
            np.full(n, -1, np.int32),
            pos,
            pos + np.int32(1),
            np.zeros(n, np.int64),
            np.ones(n, np.bool_),
        )

    @classmethod
    def draft_tree(cls, seq: int, length: int, parents: Sequence[int]) -> Rows:
        """The last token at slot `length` and nodes 1..n below it; `parents[i - 1]` is node
        i's parent (0: the last token).

        Node i sits at slot `length + i` with `pos = length + depth`; it sees `[0, length + 1)` and
        its ancestors. Raises ValueError for more than 63 nodes or a parent that does not precede
        its node.
        """
        n = len(parents)
        if n > MAX_TREE_BIT + 1:
            raise ValueError(
                f"a draft tree of {n} nodes is too large; at most {MAX_TREE_BIT + 1} are supported"
            )
        depth = [0] * (n + 1)
        tree = [0] * (n + 1)
        for node, parent in enumerate(parents, start=1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"node {node} names parent {parent}; a parent must come before its node"
                )
            depth[node] = depth[parent] + 1
            tree[node] = tree[parent] | 1 << (node - 1)
        return cls(
            np.full(n + 1, seq, np.int32),
            np.arange(length, length + n + 1, dtype=np.int32),
            length + np.asarray(depth, dtype=np.int32),
            np.full(n + 1, length + 1, np.int32),
            np.asarray(tree, dtype=np.int64),
        )

    @classmethod
    def concat(cls, parts: Sequence[Rows]) -> Rows:
        """All rows of `parts`, in order."""
        if len(parts) == 1:
            return parts[0]
        joined = {
            f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)[:5]
        }
        if all(p.accelerated is None for p in parts):
            return cls(**joined)
        flags = [
            np.zeros(len(p), np.bool_) if p.accelerated is None else p.accelerated for p in parts
        ]
        return cls(**joined, accelerated=np.concatenate(flags))

    def visible_end(self) -> NDArray[np.int32]:
        """[N]: one past the last slot that each row may see."""
        if not self.tree.any():
            return self.prefix
        bits = np.array([int(t).bit_length() for t in self.tree], dtype=np.int32)
        return self.prefix + bits
