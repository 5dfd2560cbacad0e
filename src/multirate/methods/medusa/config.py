"""Configuration of Medusa's heads, and decoding settings."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from multirate.decoding.speculate.drafter import MAX_TREE_NODES
from multirate.methods._shared.config import MethodConfig
from multirate.methods._shared.joined_drafter import JoinedConfig
from multirate.methods._shared.reduced_head import DEFAULT_IN_WORDS, default_draft_vocab
from multirate.methods._shared.shape import BaseShape
from multirate.runtime.draft_branch import DraftWeights

WIDTHS = (3, 2, 1)
"""Children per node of a draft tree, by default."""
_ACCEPTED = f"a list of at most `heads` whole numbers of at least 1, at most {MAX_TREE_NODES} nodes"


def nodes_of(widths: tuple[int, ...]) -> int:
    """Number of nodes in a tree where every node of depth d - 1 has widths[d - 1] children."""
    return sum(prod(widths[:depth]) for depth in range(1, len(widths) + 1))


@dataclass(frozen=True)
class MedusaConfig(MethodConfig):
    METHOD: ClassVar[str] = "medusa"
    FROM_BASE: ClassVar[dict[str, str]] = {"draft_vocab": DEFAULT_IN_WORDS}

    heads: int = 3
    """Number of heads, from 1 to 16; head k drafts the token k places after the next."""
    draft_vocab: int | None = None
    """Size of the draft head, which covers the most frequent tokens of the training data. Null: the
    whole vocabulary. [ours]
    """

    def check(self) -> None:
        self.require(1 <= self.heads <= 16, "heads", "a whole number from 1 to 16")
        self.require_draft_vocab()

    def check_base(self, base: BaseShape) -> None:
        self.require_draft_vocab(base.vocab_size)

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        return {"draft_vocab": default_draft_vocab(base.vocab_size)}


@dataclass(frozen=True)
class MedusaDecodeConfig(JoinedConfig):
    METHOD: ClassVar[str] = "medusa"

    widths: tuple[int, ...] | None = None
    """Children per node of the draft tree at depth 1, 2, … Null: 3, 2 and 1."""
    weights: DraftWeights = "int4"
    """How the native kernel packs the heads and the draft head. [ours]"""

    def check(self) -> None:
        super().check()
        if self.widths is not None:
            fits = min(self.widths, default=0) >= 1 and nodes_of(self.widths) <= MAX_TREE_NODES
            self.require(fits, "widths", _ACCEPTED)
