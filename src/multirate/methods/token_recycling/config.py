"""Settings of token recycling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multirate.decoding.drafter import MAX_TREE_NODES
from multirate.methods.common.joined_drafter import JoinedConfig

STATIC_TREE = (4, 4, 3, 2)


@dataclass(frozen=True)
class TokenRecyclingConfig(JoinedConfig):
    """Decoding settings; also see JoinedConfig."""

    METHOD: ClassVar[str] = "token_recycling"

    k: int = 8
    """How many successors of each token are remembered."""
    tree: tuple[int, ...] | None = None
    """Nodes of a draft at depth 1, 2, … Null: chosen by how often successors of each rank were
    accepted lately, weighed against a row's measured cost [ours]; STATIC_TREE while that cost is
    unknown.
    """
    nodes: int = 16
    """Maximum number of nodes in a draft without `tree`."""
    prompt_tokens: int = 0
    """How many of the prompt's newest tokens have their successors remembered before the first
    draft. Each costs the time of one row of the head.
    """

    def check(self) -> None:
        super().check()
        self.require(1 <= self.k <= 64, "k", "a whole number from 1 to 64")
        self.require(1 <= self.nodes <= MAX_TREE_NODES, "nodes", f"from 1 to {MAX_TREE_NODES}")
        self.require(self.prompt_tokens >= 0, "prompt_tokens", "a whole number of at least 0")
        tree = STATIC_TREE if self.tree is None else self.tree
        self.require(
            min(tree, default=0) >= 1 and sum(tree) <= MAX_TREE_NODES,
            "tree",
            f"null, or a list of whole numbers of at least 1 that sum to at most {MAX_TREE_NODES}",
        )
