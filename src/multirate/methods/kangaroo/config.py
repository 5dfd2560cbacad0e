"""Kangaroo's configuration (arXiv 2404.18911)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from multirate.methods._shared.config import MethodConfig
from multirate.methods._shared.shape import BaseShape


@dataclass(frozen=True)
class KangarooConfig(MethodConfig):
    """One attention adapter at a fixed shallow exit, with as many key/value heads as query heads.
    Drafts use the base model's head, the whole one in the paper.
    """

    METHOD: ClassVar[str] = "kangaroo"
    FROM_BASE: ClassVar[dict[str, str]] = {"exit_layer": "L/16, at least 1"}

    exit_layer: int
    """Layers of the base model before the adapter (the paper: 2 of 32)."""
    draft_vocab: int | None = None
    """Size of the draft head, which covers the most frequent tokens of the training data. Null: the
    whole vocabulary. [ours]
    """

    def check(self) -> None:
        self.require_count("exit_layer")
        self.require_draft_vocab()

    def check_base(self, base: BaseShape) -> None:
        self.require_draft_vocab(base.vocab_size)
        self.require(
            self.exit_layer < base.num_layers,
            "exit_layer",
            f"below the base model's {base.num_layers} layers",
        )

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        return {"exit_layer": max(1, round(base.num_layers / 16))}
