"""Kangaroo's configuration (arXiv 2404.18911)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from multirate.methods._shared.feature_config import OwnAttentionConfig
from multirate.methods._shared.shape import BaseShape


@dataclass(frozen=True)
class KangarooConfig(OwnAttentionConfig):
    """One attention adapter at a fixed shallow exit. Drafts use the base model's head, the whole
    one in the paper.
    """

    METHOD: ClassVar[str] = "kangaroo"

    exit_layer: int = field(kw_only=True)
    """Layers of the base model before the adapter (the paper: 2 of 32)."""
    threshold: float = 0.6
    """Drafting stops at a token whose top-1 probability is below this; that token is still
    verified.
    """
    max_draft: int = 6
    """Maximum number of drafted tokens."""

    def check(self) -> None:
        super().check()
        self.require_count("exit_layer", "max_draft")
        self.require(0 <= self.threshold <= 1, "threshold", "0 to 1")

    def check_base(self, base: BaseShape) -> None:
        super().check_base(base)
        self.require(
            self.exit_layer < base.num_layers,
            "exit_layer",
            f"below the base model's {base.num_layers} layers",
        )

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        """Exit after L/16 layers (the paper's 2 of 32); as many key/value heads as query heads."""
        exit_layer = max(1, round(base.num_layers / 16))
        return super().defaults(base) | {"exit_layer": exit_layer, "kv_heads": base.num_heads}
