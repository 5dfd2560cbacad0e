"""Medusa's heads [Cai et al. 2024, Medusa-1]: student_k = x + SiLU(W_k x), read by the base's
frozen LM head, or by its rows of fewer tokens.

x is the base's final residual after its final norm. W_k starts at zero: an untrained head repeats
the base's next token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multirate.methods._shared.layers import zero_linear
from multirate.methods._shared.reduced_head import first_tokens
from multirate.methods._shared.shape import BaseShape
from multirate.methods.medusa.config import MedusaConfig


class MedusaHeads(nn.Module):
    draft_tokens: Tensor | None
    """[draft_vocab] int64 ids of the reduced draft head's rows, increasing; None: the full head."""

    def __init__(self, config: MedusaConfig, base: BaseShape) -> None:
        super().__init__()
        self.config = config
        size = base.hidden_size
        self.heads = nn.ModuleList(zero_linear(size, size) for _ in range(config.heads))
        self.register_buffer("draft_tokens", first_tokens(config.draft_vocab))

    def student(self, k: int, x: Tensor) -> Tensor:
        """x [..., d], normed → what head k, from 1, says: [..., d], normed."""
        return x + F.silu(self.heads[k - 1](x))

    def forward(self, x: Tensor, count: int | None = None) -> Tensor:
        """x [..., d], normed → [K, ..., d], normed; of the first `count` heads (None: all)."""
        heads = range(1, (count or self.config.heads) + 1)
        return torch.stack([self.student(k, x) for k in heads])
