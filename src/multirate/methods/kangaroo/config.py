"""Kangaroo's configuration (arXiv 2404.18911)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from multirate.methods.common.config import MethodConfig
from multirate.methods.common.shape import BaseShape


@dataclass(frozen=True)
class KangarooConfig(MethodConfig):
    """One attention adapter at a fixed shallow exit. Drafts use the base model's head."""

    METHOD: ClassVar[str] = "kangaroo"

    exit_layer: int
    """Layers of the base model before the adapter (the paper: 2 of 32)."""
    heads: int
    """Query heads of the adapter."""
    kv_heads: int
    """Key/value heads; a divisor of heads."""
    head_dim: int
    """Width of a head; even."""
    norm_eps: float = 1e-5
    """Epsilon of the RMS norms."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding."""
    threshold: float = 0.6
    """Drafting stops at a token whose top-1 probability is below this; that token is still
    verified.
    """
    max_draft: int = 6
    """Maximum number of drafted tokens."""
    draft_vocab: int | None = None
    """Size of the reduced draft head, which covers the most frequent tokens of the training data
    [ours]. Null: the base's whole head (the paper).
    """

    def check(self) -> None:
        self.require_count("exit_layer", "heads", "kv_heads", "head_dim", "max_draft")
        self.require(self.heads % self.kv_heads == 0, "kv_heads", "a divisor of heads")
        self.require(self.head_dim % 2 == 0, "head_dim", "an even number (rotary pairs)")
        self.require(0 <= self.threshold <= 1, "threshold", "0 to 1")
        self.require_draft_vocab()
        self.require(0 < self.norm_eps <= 1, "norm_eps", "above 0, at most 1")
        self.require(0 < self.rope_theta <= 1e15, "rope_theta", "above 0, at most 1e15")

    def check_base(self, base: BaseShape) -> None:
        """Raises UserError for a config that does not fit ``base``."""
        self.require(
            self.exit_layer < base.num_layers,
            "exit_layer",
            f"below the base model's {base.num_layers} layers",
        )
        self.require_draft_vocab(base.vocab_size)

    @staticmethod
    def for_base(
        base: BaseShape, match_parameters: int | None = None, **options: Any
    ) -> KangarooConfig:
        """Defaults for a base model: exit after L/16 layers (the paper's 2 of 32), heads as the
        base's. ``options`` replace fields.

        ``match_parameters`` chooses the number of heads so that the adapter has about this many
        parameters, for comparisons at equal size. It sets as many key/value heads as query heads,
        because all of the adapter's parameters are in its attention.
        """
        values: dict[str, Any] = {
            "exit_layer": max(1, round(base.num_layers / 16)),
            "heads": base.num_heads,
            "kv_heads": base.num_heads,
            "head_dim": base.head_dim,
            "norm_eps": base.norm_eps,
            "rope_theta": base.rope_theta,
        }
        values |= options
        if match_parameters is not None:
            per_head = 4 * base.hidden_size * values["head_dim"]  # q, k, v and o of one head
            heads = max(1, round((match_parameters - 2 * base.hidden_size) / per_head))
            values |= {"heads": heads, "kv_heads": heads}
        config = KangarooConfig.from_json(values)
        config.check_base(base)
        return config
