"""EAGLE's drafter [Li et al. 2024]. One token at position t, e its embedding, f the model's final
residual h_L at t − 1 (drafting: the layer's own output there):

    x = W [e; RMSNorm(f)] + b
    y = x + attn(x)                     (own keys and values, no norm before it)
    p = y + mlp(RMSNorm(y));   draft = the model's final norm and head on p

The paper's features are the model's final residuals after the final norm; here they are carried
before it, as everywhere, and enter through a norm of the layer's own. [ours]
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from multirate.methods._shared.feature_branch import FeatureBranch
from multirate.methods._shared.layers import RMSNorm, branch_layer
from multirate.methods._shared.reduced_head import limited_to
from multirate.methods._shared.shape import BaseShape
from multirate.methods.eagle.config import EagleConfig
from multirate.runtime.decoder import Decoder
from multirate.runtime.draft_branch import BranchHead, DraftBranch, Linear


class EagleLayer(FeatureBranch):
    config: EagleConfig

    def __init__(self, config: EagleConfig, base: BaseShape) -> None:
        d = base.hidden_size
        super().__init__(config, base, inputs=d)
        self.carried_norm = RMSNorm(d, base.norm_eps)
        self.fc = nn.Linear(2 * d, d)
        nn.init.zeros_(self.fc.bias)

    def carried(self, hidden: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        return hidden

    def entering(self, embedded: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedded, self.carried_norm(carried)], dim=-1))
        return x, x

    def branch(self) -> DraftBranch:
        weight, d, eps = self.fc.weight, self.base.hidden_size, self.base.norm_eps
        return DraftBranch(
            fuse_branch=Linear(weight[:, :d], bias=self.fc.bias),
            fuse_carried=Linear(weight[:, d:], self.carried_norm.weight),
            layer=branch_layer(self.attn, self.mlp, eps, norm_mlp=self.mlp_norm),
            head=BranchHead(self.draft_tokens),
            eps=eps,
        )

    def logits(self, decoder: Decoder, p: Tensor) -> Tensor:
        return limited_to(self.draft_tokens, decoder.logits(p))
