"""Configuration of a draft layer that reads features (EAGLE, EAGLE-3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from multirate.methods._shared.config import MethodConfig
from multirate.methods._shared.reduced_head import DEFAULT_IN_WORDS, default_draft_vocab
from multirate.methods._shared.shape import BaseShape


@dataclass(frozen=True)
class FeatureConfig(MethodConfig):
    """A Llama-like layer that drafts from the previous token's hidden state. ``for_base`` takes its
    sizes from the base model.
    """

    FROM_BASE: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            ("heads", "kv_heads", "head_dim", "intermediate", "norm_eps", "rope_theta"),
            "the model's",
        ),
        "draft_vocab": DEFAULT_IN_WORDS,
    }

    heads: int
    """Query heads of the layer."""
    kv_heads: int
    """Its key/value heads; a divisor of heads."""
    head_dim: int
    """Width of a head; even."""
    intermediate: int
    """Width of its MLP."""
    norm_eps: float = 1e-5
    """Epsilon of its RMS norms."""
    rope_theta: float = 10000.0
    """Base of its rotary embedding."""
    draft_vocab: int | None = None
    """Size of the draft head, which covers the most frequent tokens of the training data. Null: the
    whole vocabulary. [ours]
    """
    unroll_steps: int = 1
    """Training steps through the layer's own drafts, from 1 to 16. More than 1 is HASS's idea."""

    def check(self) -> None:
        self.require_count("heads", "kv_heads", "head_dim", "intermediate")
        self.require(self.heads % self.kv_heads == 0, "kv_heads", "a divisor of heads")
        self.require(self.head_dim % 2 == 0, "head_dim", "an even number (rotary pairs)")
        self.require_draft_vocab()
        self.require(0 < self.norm_eps <= 1, "norm_eps", "above 0, at most 1")
        self.require(0 < self.rope_theta <= 1e15, "rope_theta", "above 0, at most 1e15")
        self.require(1 <= self.unroll_steps <= 16, "unroll_steps", "1 to 16")

    def check_base(self, base: BaseShape) -> None:
        self.require_draft_vocab(base.vocab_size)

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        return {
            "heads": base.num_heads,
            "kv_heads": base.num_kv_heads,
            "head_dim": base.head_dim,
            "intermediate": base.whole_tiles,
            "norm_eps": base.norm_eps,
            "rope_theta": base.rope_theta,
            "draft_vocab": default_draft_vocab(base.vocab_size),
        }
