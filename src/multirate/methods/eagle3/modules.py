"""EAGLE-3's drafter [Li et al. 2025]. One token at position t, f_i the target model's residual
entering layer i at t − 1, e the embedding at t:

    g = W ([f_a; f_b; f_c] / s)                         (drafting: the layer's own output at t − 1)
    y = g + attn([RMSNorm_e(e); RMSNorm_g(g)])          (own keys and values)
    p = y + mlp(RMSNorm(y));   draft = head(RMSNorm_out(p))

Norm and head are its own; the head says the tokens of a draft vocabulary. s are the sizes of the
residuals' channels, constants from training's start: some are hundreds of times the others, and a
step of any size in W would be one of these alone. [ours] The paper has W alone. With
``norm_before_residual`` y begins with RMSNorm_g(g).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from multirate.methods._shared.feature_branch import FeatureBranch
from multirate.methods._shared.layers import RMSNorm, branch_layer
from multirate.methods._shared.reduced_head import spread_over
from multirate.methods._shared.shape import BaseShape
from multirate.methods.eagle3.config import Eagle3Config
from multirate.runtime.decoder import Decoder
from multirate.runtime.draft_branch import BranchHead, DraftBranch, Features


class Eagle3Layer(FeatureBranch):
    config: Eagle3Config
    tap_sizes: Tensor

    def __init__(self, config: Eagle3Config, base: BaseShape) -> None:
        d, eps = base.hidden_size, config.norm_eps
        super().__init__(config, base, inputs=2 * d)
        self.taps = config.taps
        self.fc = nn.Linear(len(self.taps) * d, d, bias=False)
        self.register_buffer("tap_sizes", torch.ones(len(self.taps) * d))
        self.embedding_norm, self.carried_norm = RMSNorm(d, eps), RMSNorm(d, eps)
        self.norm = RMSNorm(d, eps)
        self.head = nn.Linear(d, config.draft_vocab or base.vocab_size, bias=False)

    def carried(self, hidden: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        side_by_side = torch.cat([taps[layer] for layer in self.taps], dim=-1)
        out: Tensor = self.fc(side_by_side / self.tap_sizes)
        return out

    def entering(self, embedded: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.carried_norm(carried)
        x = normed if self.config.norm_before_residual else carried
        return x, torch.cat([self.embedding_norm(embedded), normed], dim=-1)

    def features(self) -> Tensor:
        """W with the sizes in it, [d, taps · d]."""
        return self.fc.weight / self.tap_sizes

    def branch(self) -> DraftBranch:
        eps, before = self.config.norm_eps, self.config.norm_before_residual
        layer = branch_layer(
            self.attn,
            self.mlp,
            eps,
            norm_attention=None if before else self.carried_norm,
            norm_mlp=self.mlp_norm,
            norm_beside=self.embedding_norm,
        )
        return DraftBranch(
            layer=layer,
            norm_in=self.carried_norm.weight if before else None,
            features=Features(self.taps, self.features(), added=False),
            head=BranchHead(self.draft_tokens, self.head.weight, self.norm.weight),
            eps=eps,
        )

    def logits(self, decoder: Decoder, p: Tensor) -> Tensor:
        own = self.head(self.norm(p.to(self.head.weight.dtype))).float()
        return spread_over(self.draft_tokens, own, self.base.vocab_size)
