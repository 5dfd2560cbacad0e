"""Configuration of Hydra's heads, and decoding settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from multirate.decoding.speculate.drafter import MAX_TREE_NODES
from multirate.methods._shared.config import MethodConfig
from multirate.methods._shared.joined_drafter import JoinedConfig
from multirate.methods._shared.reduced_head import DEFAULT_IN_WORDS, default_draft_vocab
from multirate.methods._shared.shape import BaseShape
from multirate.runtime.draft_branch import DraftWeights


@dataclass(frozen=True)
class HydraConfig(MethodConfig):
    METHOD: ClassVar[str] = "hydra"
    FROM_BASE: ClassVar[dict[str, str]] = {"draft_vocab": DEFAULT_IN_WORDS}

    heads: int = 4
    """Number of heads, from 1 to 16; head k drafts the token k places after the next."""
    layers: int = 4
    """Layers of each head's MLP, from 1 to 16. Hydra++'s number is from memory."""
    draft_vocab: int | None = None
    """Size of the draft head, which covers the most frequent tokens of the training data. Null: the
    whole vocabulary.
    """

    def check(self) -> None:
        self.require(1 <= self.heads <= 16, "heads", "a whole number from 1 to 16")
        self.require(1 <= self.layers <= 16, "layers", "a whole number from 1 to 16")
        self.require_draft_vocab()

    def check_base(self, base: BaseShape) -> None:
        self.require_draft_vocab(base.vocab_size)

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        return {"draft_vocab": default_draft_vocab(base.vocab_size)}


@dataclass(frozen=True)
class HydraDecodeConfig(JoinedConfig):
    """How the draft tree grows, level by level, from the heads' likeliest tokens. Also see
    JoinedConfig.
    """

    METHOD: ClassVar[str] = "hydra"

    nodes: int = 11
    """Maximum number of nodes in the tree."""
    width: int = 2
    """Nodes drafted from per level."""
    depth: int | None = None
    """Maximum number of levels. Null: the number of heads."""
    draft_threshold: float = 0.15
    """Minimum path probability of a node to draft from; not tuned."""
    verify_threshold: float = 0.05
    """Minimum path probability of any other node."""
    weights: DraftWeights = "int4"
    """How the native kernel packs a reduced draft head."""

    def check(self) -> None:
        super().check()
        self.require(1 <= self.nodes <= MAX_TREE_NODES, "nodes", f"from 1 to {MAX_TREE_NODES}")
        self.require(1 <= self.width <= 16, "width", "a whole number from 1 to 16")
        self.require(self.depth is None or self.depth >= 1, "depth", "null, or at least 1")
        for name in ("draft_threshold", "verify_threshold"):
            self.require(0 <= getattr(self, name) <= 1, name, "a number from 0 to 1")
