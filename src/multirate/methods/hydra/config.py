"""Configuration of Hydra's heads, and what may be set when decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from multirate.decoding.drafter import MAX_TREE_NODES
from multirate.methods.common.acceptance_config import AcceptanceConfig
from multirate.methods.common.config import DraftWeights, MethodConfig
from multirate.methods.common.joined_drafter import JoinedConfig
from multirate.methods.common.reduced_head import default_draft_vocab
from multirate.methods.common.shape import BaseShape


@dataclass(frozen=True)
class HydraConfig(MethodConfig):
    """The defaults are Hydra++; Hydra has layers 1 and no prefix."""

    METHOD: ClassVar[str] = "hydra"

    heads: int = 4
    """K; head k drafts the token k places after the next."""
    layers: int = 4
    """Of each head's MLP."""
    prefix: bool = True
    """Whether a decoder layer of its own prepares what the heads read."""
    draft_vocab: int | None = None
    """Size of the draft head (the most frequent tokens of the training data); null: the whole
    vocabulary.
    """

    def check(self) -> None:
        self.require(1 <= self.heads <= 16, "heads", "a whole number from 1 to 16")
        self.require(1 <= self.layers <= 16, "layers", "a whole number from 1 to 16")
        self.require_draft_vocab()

    @staticmethod
    def for_base(base: BaseShape, **options: Any) -> HydraConfig:
        """The defaults for a base model, with `options` replacing them."""
        config = HydraConfig.from_json(
            {"draft_vocab": default_draft_vocab(base.vocab_size)} | options
        )
        config.require_draft_vocab(base.vocab_size)
        return config


@dataclass(frozen=True)
class HydraDecodeConfig(AcceptanceConfig, JoinedConfig):
    """How the tree grows, level by level, from the heads' likeliest tokens.

    nodes: of the tree at most. width: nodes drafted from per level. depth: levels at most; null: as
    many as there are heads. draft_threshold, verify_threshold: least path probability (see
    draft_tree.py) of a node that is drafted from, and of any other. weights: of a reduced draft
    head on the native kernel. The others: AcceptanceConfig, JoinedConfig.
    """

    METHOD: ClassVar[str] = "hydra"

    nodes: int = 11
    width: int = 2
    depth: int | None = None
    draft_threshold: float = 0.15
    verify_threshold: float = 0.05
    weights: DraftWeights = "int4"

    def check(self) -> None:
        super().check()
        self.require(1 <= self.nodes <= MAX_TREE_NODES, "nodes", f"from 1 to {MAX_TREE_NODES}")
        self.require(1 <= self.width <= 16, "width", "a whole number from 1 to 16")
        self.require(self.depth is None or self.depth >= 1, "depth", "null, or at least 1")
        for name in ("draft_threshold", "verify_threshold"):
            self.require(0 <= getattr(self, name) <= 1, name, "a number from 0 to 1")
