"""Settings of token recycling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multirate.decoding.speculate.drafter import MAX_TREE_NODES
from multirate.methods._shared.joined_drafter import JoinedConfig

STATIC_TREE = (4, 4, 3, 2)
"""Nodes of a draft at depth 1, 2, …"""


@dataclass(frozen=True)
class TokenRecyclingConfig(JoinedConfig):
    """Decoding settings; also see JoinedConfig."""

    METHOD: ClassVar[str] = "token_recycling"

    k: int = 8
    """How many successors of each token are remembered."""
    nodes: int = 16
    """Maximum number of nodes in a draft. It grows by how often successors of each rank were
    accepted lately, weighed against a row's measured cost [ours]. While that cost is unknown it
    has 4, 4, 3 and 2 nodes at depth 1 to 4.
    """

    def check(self) -> None:
        super().check()
        self.require(1 <= self.k <= 64, "k", "a whole number from 1 to 64")
        self.require(1 <= self.nodes <= MAX_TREE_NODES, "nodes", f"from 1 to {MAX_TREE_NODES}")
