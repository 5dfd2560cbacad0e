"""Hydra's heads [Ankner et al. 2024]. Head k reads x, and the embeddings e_1 … e_k of the tokens
drafted so far, the model's own next token first:

    z = [x; RMSNorm(e_1); …; RMSNorm(e_k)]
    y = x + R_k z + SiLU(W_k,1 z)
    y ← y + SiLU(W_k,l y)                 (further layers of the MLP)

read by the base's frozen LM head. x is the base's final residual after a decoder layer with its own
keys and values, the prefix (Hydra++), and the base's final norm. The norm
of embeddings makes them as large as x. [ours] R and W start at zero, and so does what the prefix
layer adds: an untrained head repeats the base's next token. Training starts R otherwise (train.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multirate.methods._shared.layers import DecoderBlock, RMSNorm, zero_linear
from multirate.methods._shared.reduced_head import first_tokens
from multirate.methods._shared.shape import BaseShape
from multirate.methods.hydra.config import HydraConfig


class HydraHead(nn.Module):
    """The head that knows `tokens` tokens."""

    def __init__(self, size: int, tokens: int, layers: int) -> None:
        super().__init__()
        inputs = (tokens + 1) * size
        self.size = size
        self.residual = zero_linear(inputs, size)
        self.first = zero_linear(inputs, size)
        self.later = nn.ModuleList(zero_linear(size, size) for _ in range(layers - 1))

    def forward(self, z: Tensor) -> Tensor:
        """z [..., (tokens + 1) · d] → y [..., d], normed."""
        y = z[..., : self.size] + self.residual(z) + F.silu(self.first(z))
        for layer in self.later:
            y = y + F.silu(layer(y))
        return y


class HydraHeads(nn.Module):
    draft_tokens: Tensor | None
    """[draft_vocab] int64 ids of the reduced draft head's rows, increasing; None: the full head."""

    def __init__(self, config: HydraConfig, base: BaseShape) -> None:
        super().__init__()
        self.config = config
        size = base.hidden_size
        self.embed_norm = RMSNorm(size, base.norm_eps)
        self.prefix = DecoderBlock(base)
        self.heads = nn.ModuleList(
            HydraHead(size, k, config.layers) for k in range(1, config.heads + 1)
        )
        self.register_buffer("draft_tokens", first_tokens(config.draft_vocab))

    def joined(self, z: Tensor, embedded: Tensor) -> Tensor:
        """z [n, k · d] of head k - 1 (of the first head: x) and the next tokens' embeddings [n, d]
        → z of head k.
        """
        return torch.cat([z, self.embed_norm(embedded)], dim=-1)

    def student(self, k: int, z: Tensor) -> Tensor:
        """What head k, from 1, says: z [n, (k + 1) · d] → y [n, d], normed."""
        said: Tensor = self.heads[k - 1](z)
        return said
