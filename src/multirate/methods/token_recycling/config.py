"""Settings of token recycling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multirate.decoding.drafter import MAX_TREE_NODES
from multirate.methods.common.joined_drafter import JoinedConfig

STATIC_TREE = (4, 4, 3, 2)


@dataclass(frozen=True)
class TokenRecyclingConfig(JoinedConfig):
    """k: successors remembered of each token. tree: nodes of a draft at depth 1, 2, …; null: those
    that are likely enough for their time, by how often successors of each rank were right lately
    [ours], and STATIC_TREE where it is not known what a row takes. nodes: of a draft without
    `tree`, at most. prompt_tokens: newest tokens of a prompt whose successors are remembered before
    the first draft, each for the time of a row of the head. The others: JoinedConfig.
    """

    METHOD: ClassVar[str] = "token_recycling"

    k: int = 8
    tree: tuple[int, ...] | None = None
    nodes: int = 16
    prompt_tokens: int = 0

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
