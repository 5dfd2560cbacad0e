"""Kangaroo's adapter on the exit residual h_E: norm → attention with its own K/V → residual → norm → the base's head.

    y = h_E + attn(RMSNorm(h_E));   draft = lm_head(norm_out(y))

No MLP, the base's head shared and frozen. The output norm starts as a copy of the base's final norm and the attention's
output at zero, so an untrained adapter is the base's early exit [ours].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from multirate.backbone.kv_cache import KVCache
from multirate.backbone.rows import Rows
from multirate.methods.kangaroo.config import KangarooConfig
from multirate.methods.layers import OwnAttention, RMSNorm
from multirate.methods.shape import BaseShape


class KangarooAdapter(nn.Module):
    """See the module's docstring. Its result is already normed: it goes to the LM head without the base's final norm."""

    def __init__(self, config: KangarooConfig, base: BaseShape) -> None:
        super().__init__()
        config.check_base(base)
        self.config, self.base = config, base
        self.norm = RMSNorm(base.hidden_size, config.norm_eps)
        self.attn = OwnAttention(base.hidden_size, config.heads, config.kv_heads, config.head_dim, config.rope_theta)
        self.norm_out = RMSNorm(base.hidden_size, config.norm_eps)
        nn.init.zeros_(self.attn.o.weight)

    @torch.no_grad()
    def start_from(self, final_norm: nn.Module | None) -> None:
        """Copy the base's final norm (call before training; Gemma's norms scale by 1 + weight)."""
        weight = getattr(final_norm, "weight", None)
        if isinstance(weight, Tensor):
            offset = 1.0 if "gemma" in type(final_norm).__name__.lower() else 0.0
            self.norm_out.weight.copy_(weight.float() + offset)

    def forward(self, x: Tensor) -> Tensor:
        """Training: h_E [B, T, d] → normed [B, T, d], causal."""
        return self.norm_out(x + self.attn(self.norm(x))[0])

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty one-layer cache for ``rows``."""
        return self.attn.new_cache(batch, capacity)

    def rows(self, x: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        """Decoding: h_E [N, d] → normed [N, d]; K/V of every row are written at ``rows.slot``."""
        return self.norm_out(x + self.attn.rows(self.norm(x), rows, cache))
