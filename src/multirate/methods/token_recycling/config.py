"""Settings of token recycling."""

from __future__ import annotations

from dataclasses import dataclass

from multirate.decoding.drafter import MAX_TREE_NODES
from multirate.methods.common.config import MethodConfig


@dataclass(frozen=True)
class TokenRecyclingConfig(MethodConfig):
    """k: successors remembered of each token. tree: nodes of a draft at depth 1, 2, …"""

    k: int = 8
    tree: tuple[int, ...] = (4, 4, 3, 2)

    def check(self) -> None:
        self.require(1 <= self.k <= 64, "k", "a whole number from 1 to 64")
        self.require(
            min(self.tree, default=0) >= 1 and sum(self.tree) <= MAX_TREE_NODES,
            "tree",
            f"a list of whole numbers of at least 1, {MAX_TREE_NODES} in all at most",
        )
