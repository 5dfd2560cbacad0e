"""The draft tree of one sequence while it grows from the accelerated stream, best-first within each level. [ours]

A node's *reach* is the stream's own estimate that verification arrives there: the product of the draft
probabilities on its path. A node pays while its reach exceeds what it costs relative to a token:
`expand` for a node that is itself drafted from (one more level), `keep` for a leaf (one more verified row); both rise
with the number of nodes where rows do not all cost the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class DraftTree:
    """Nodes 1..n below the root 0, in the order they were drafted from; leaves are added by `finish`."""

    depth_limit: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    reach: list[float] = field(default_factory=lambda: [1.0])
    depth: list[int] = field(default_factory=lambda: [0])
    bits: list[int] = field(default_factory=lambda: [0])
    _leaves: list[tuple[float, int, int]] = field(default_factory=list)  # (reach, parent, token)

    def add(self, parent: int, token: int, reach: float) -> int:
        """Appends a node and returns its number. Its ancestors' bits include itself (Rows.tree)."""
        node = len(self.tokens) + 1
        self.tokens.append(token)
        self.parents.append(parent)
        self.reach.append(reach)
        self.depth.append(self.depth[parent] + 1)
        self.bits.append(self.bits[parent] | 1 << (node - 1))
        return node

    def grow(
        self, frontier: Sequence[int], ids: Sequence[Sequence[int]], probs: Sequence[Sequence[float]],
        width: int, expand: np.ndarray, keep: np.ndarray,
    ) -> list[int]:
        """Candidates below the frontier nodes, given their top tokens and probabilities → the nodes to draft from next.

        expand, keep [nodes]: least reach of the n-th node, not falling. At most `width` candidates that reach `expand`
        become nodes; the others that reach the first of `keep` wait as leaves.
        """
        candidates: list[tuple[float, int, int]] = []
        for node, node_ids, node_probs in zip(frontier, ids, probs, strict=True):
            if self.depth[node] >= self.depth_limit:
                continue
            here = self.reach[node]
            for token, prob in zip(node_ids, node_probs, strict=True):
                if here * prob < keep[0]:
                    break  # tokens come best first
                candidates.append((here * prob, node, token))
        candidates.sort(key=lambda c: -c[0])
        chosen: list[int] = []
        for reach, parent, token in candidates:
            deeper = self.depth[parent] + 1 < self.depth_limit
            if len(chosen) < width and deeper and reach >= expand[len(self.tokens)]:
                chosen.append(self.add(parent, token, reach))
            else:
                self._leaves.append((reach, parent, token))
        return chosen

    def finish(self, keep: np.ndarray) -> int:
        """Adds the best leaves that reach `keep` [nodes], up to as many nodes in all; returns how many were added."""
        self._leaves.sort(key=lambda c: -c[0])
        before = len(self.tokens)
        for reach, parent, token in self._leaves:
            if len(self.tokens) >= len(keep) or reach < keep[len(self.tokens)]:
                break
            self.add(parent, token, reach)
        return len(self.tokens) - before
