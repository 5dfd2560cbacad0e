"""Kangaroo's adapter on the exit residual h_E: norm → attention with its own K/V → residual → norm
→ the base's head.

    y = RMSNorm_out(h_E + attn(RMSNorm(h_E)));   draft = lm_head(final_norm(y))

No MLP, the base's head shared and frozen. The paper's output norm replaces the base's final norm;
ours comes before it [ours], so that the head is the same call as everywhere. Its weight starts at
one and the attention's output at zero: an untrained adapter is the base's early exit, up to the
epsilon of a second norm.
"""

from __future__ import annotations

from torch import Tensor, nn

from multirate.methods._shared.layers import OwnAttention, RMSNorm, branch_layer
from multirate.methods._shared.reduced_head import first_tokens
from multirate.methods._shared.shape import BaseShape
from multirate.methods.kangaroo.config import KangarooConfig
from multirate.runtime.captured import StaticSlots
from multirate.runtime.draft_branch import BranchHead, DraftBranch
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import Rows


class KangarooAdapter(nn.Module):
    draft_tokens: Tensor | None
    """[draft_vocab] int64 ids of the reduced draft head's rows, increasing; None: the full head."""

    def __init__(self, config: KangarooConfig, base: BaseShape) -> None:
        super().__init__()
        config.check_base(base)
        self.config, self.base = config, base
        self.norm = RMSNorm(base.hidden_size, base.norm_eps)
        self.attn = OwnAttention(
            base.hidden_size, base.num_heads, base.num_heads, base.head_dim, base.rope_theta
        )
        self.norm_out = RMSNorm(base.hidden_size, base.norm_eps)
        nn.init.zeros_(self.attn.o.weight)
        self.register_buffer("draft_tokens", first_tokens(config.draft_vocab))

    def forward(self, x: Tensor) -> Tensor:
        """Training: h_E [B, T, d] → y [B, T, d], causal."""
        mixed: Tensor = self.attn(self.norm(x))[0]
        out: Tensor = self.norm_out(x + mixed)
        return out

    def branch(self) -> DraftBranch:
        """What it computes, for decoders that have a form of their own."""
        layer = branch_layer(self.attn, None, self.base.norm_eps, norm_attention=self.norm)
        return DraftBranch(
            exit_layer=self.config.exit_layer,
            layer=layer,
            norm_out=self.norm_out.weight,
            head=BranchHead(self.draft_tokens),
        )

    def rows(self, x: Tensor, rows: Rows | StaticSlots, cache: KVCache | None) -> Tensor:
        """Decoding: h_E [N, d] → y [N, d]; K/V of every row are written at ``rows.slot``, over a
        ``cache`` that attn.new_cache made (OwnAttention.rows).
        """
        out: Tensor = self.norm_out(x + self.attn.rows(self.norm(x), rows, cache))
        return out
