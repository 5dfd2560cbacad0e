"""Sizes of a draft layer with attention of its own (EAGLE, EAGLE-3, Kangaroo)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from multirate.methods._shared.config import MethodConfig
from multirate.methods._shared.reduced_head import default_draft_vocab
from multirate.methods._shared.shape import BaseShape


@dataclass(frozen=True)
class OwnAttentionConfig(MethodConfig):
    """Attention of the base model's width, with its own keys and values. ``for_base`` takes the
    sizes from the base model.
    """

    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads; a divisor of heads."""
    head_dim: int
    """Width of a head; even."""
    norm_eps: float = 1e-5
    """Epsilon of the RMS norms."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding."""
    draft_vocab: int | None = None
    """Size of the draft head, which covers the most frequent tokens of the training data. Null: the
    whole vocabulary.
    """

    def check(self) -> None:
        self.require_count("heads", "kv_heads", "head_dim")
        self.require(self.heads % self.kv_heads == 0, "kv_heads", "a divisor of heads")
        self.require(self.head_dim % 2 == 0, "head_dim", "an even number (rotary pairs)")
        self.require_draft_vocab()
        self.require(0 < self.norm_eps <= 1, "norm_eps", "above 0, at most 1")
        self.require(0 < self.rope_theta <= 1e15, "rope_theta", "above 0, at most 1e15")

    def check_base(self, base: BaseShape) -> None:
        self.require_draft_vocab(base.vocab_size)

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        return {
            "heads": base.num_heads,
            "kv_heads": base.num_kv_heads,
            "head_dim": base.head_dim,
            "norm_eps": base.norm_eps,
            "rope_theta": base.rope_theta,
        }


@dataclass(frozen=True)
class FeatureConfig(OwnAttentionConfig):
    """A Llama-like layer that drafts from the previous token's hidden state (EAGLE)."""

    intermediate: int = field(kw_only=True)
    """Width of the MLP."""
    unroll_steps: int = 1
    """Training steps through the layer's own drafts, from 1 to 16."""

    def check(self) -> None:
        super().check()
        self.require_count("intermediate")
        self.require(1 <= self.unroll_steps <= 16, "unroll_steps", "1 to 16")

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        return super().defaults(base) | {
            # a multiple of 64 keeps packed kernels on whole tiles
            "intermediate": max(64, round(base.intermediate_size / 64) * 64),
            "draft_vocab": default_draft_vocab(base.vocab_size),
        }
