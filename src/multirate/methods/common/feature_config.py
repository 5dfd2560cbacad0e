"""Sizes of a decoder layer that drafts from the previous token's hidden state (EAGLE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from multirate.methods.common.config import MethodConfig
from multirate.methods.common.reduced_head import default_draft_vocab
from multirate.methods.common.shape import BaseShape


@dataclass(frozen=True)
class FeatureConfig(MethodConfig):
    """A Llama-like layer of the base model's width, with its own keys and values. ``for_base``
    takes the sizes from the base model.
    """

    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads; a divisor of heads."""
    head_dim: int
    """Width of a head; even."""
    intermediate: int
    """Width of the MLP."""
    norm_eps: float = 1e-5
    """Epsilon of the RMS norms."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding."""
    unroll_steps: int = 1
    """Training steps through the layer's own drafts, from 1 to 16."""
    draft_vocab: int | None = None
    """Size of the draft head, which covers the most frequent tokens of the training data. Null: the
    whole vocabulary.
    """

    def check(self) -> None:
        self.require_count("heads", "kv_heads", "head_dim", "intermediate")
        self.require(self.heads % self.kv_heads == 0, "kv_heads", "a divisor of heads")
        self.require(self.head_dim % 2 == 0, "head_dim", "an even number (rotary pairs)")
        self.require(1 <= self.unroll_steps <= 16, "unroll_steps", "1 to 16")
        self.require_draft_vocab()
        self.require(0 < self.norm_eps <= 1, "norm_eps", "above 0, at most 1")
        self.require(0 < self.rope_theta <= 1e15, "rope_theta", "above 0, at most 1e15")

    def check_base(self, base: BaseShape) -> None:
        self.require_draft_vocab(base.vocab_size)

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        """Default field values for a base model: a layer of its sizes."""
        return {
            "heads": base.num_heads,
            "kv_heads": base.num_kv_heads,
            "head_dim": base.head_dim,
            # a multiple of 64 keeps packed kernels on whole tiles
            "intermediate": max(64, round(base.intermediate_size / 64) * 64),
            "norm_eps": base.norm_eps,
            "rope_theta": base.rope_theta,
            "draft_vocab": default_draft_vocab(base.vocab_size),
        }
