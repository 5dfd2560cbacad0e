"""Configuration of a draft layer that reads features (EAGLE, EAGLE-3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from multirate.methods._shared.config import MethodConfig
from multirate.methods._shared.reduced_head import DEFAULT_IN_WORDS, default_draft_vocab
from multirate.methods._shared.shape import BaseShape


@dataclass(frozen=True, kw_only=True)
class FeatureConfig(MethodConfig):
    """A Llama-like layer that drafts from the previous token's hidden state."""

    FROM_BASE: ClassVar[dict[str, str]] = {"draft_vocab": DEFAULT_IN_WORDS}

    draft_vocab: int | None = None
    """Size of the draft head, which covers the most frequent tokens of the training data. Null: the
    whole vocabulary. [ours]
    """
    unroll_steps: int = 1
    """Training steps through the layer's own drafts, from 1 to 16. More than 1 is HASS's idea."""

    def check(self) -> None:
        self.require_draft_vocab()
        self.require(1 <= self.unroll_steps <= 16, "unroll_steps", "1 to 16")

    def check_base(self, base: BaseShape) -> None:
        self.require_draft_vocab(base.vocab_size)

    def layer_shape(self, base: BaseShape) -> BaseShape:
        """A base model whose layers have the sizes of this layer: the base itself."""
        return replace(base, intermediate_size=base.whole_tiles)

    @classmethod
    def defaults(cls, base: BaseShape) -> dict[str, Any]:
        return {"draft_vocab": default_draft_vocab(base.vocab_size)}
