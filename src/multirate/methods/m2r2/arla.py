"""ARLA, accelerated residual latent attention: will this gate's token be the full model's? (paper;
details [ours])

With n_j = final_norm(p_{G_j}) of one token at gates 1..j, the probability that argmax head(p_{G_j})
= argmax head(h_L):

    z_i    = W n_i + e_i                                     latents, e_i learned per gate
    y      = z_j + Σ_{i ≤ j} softmax_i(Q z_j · K z_i / √d_z) V z_i
    score  = sigmoid(w · silu(y) + b)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ARLA(nn.Module):
    """Latent attention over the gates that a token has passed. ``size`` is d, ``latent`` d_z,
    ``gates`` J.
    """

    def __init__(self, size: int, latent: int, gates: int) -> None:
        super().__init__()
        self.down = nn.Linear(size, latent, bias=False)
        self.gate = nn.Parameter(torch.zeros(gates, latent))
        self.q = nn.Linear(latent, latent, bias=False)
        self.k = nn.Linear(latent, latent, bias=False)
        self.v = nn.Linear(latent, latent, bias=False)
        self.out = nn.Linear(latent, 1)

    def forward(self, normed: Tensor) -> Tensor:
        """normed [..., j, d], the normed stream at gates 1..j in order → logits [...] for gate
        j.
        """
        count = normed.shape[-2]
        z = self.down(normed) + self.gate[:count]  # [..., j, d_z]
        last = z[..., -1, :]
        scores = (self.k(z) @ self.q(last)[..., None])[..., 0] / z.shape[-1] ** 0.5  # [..., j]
        y = last + (scores.softmax(-1)[..., None] * self.v(z)).sum(-2)
        return self.out(F.silu(y))[..., 0]

    def of_one_gate(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W [latent, d], b [latent], w [latent] and c [] with which `forward` for one gate is w ·
        silu(W n + b) + c, because a single gate attends only to itself.
        """
        both = (
            torch.eye(len(self.gate[0]), device=self.gate.device, dtype=torch.float32)
            + self.v.weight
        )
        assert self.out.bias is not None
        return (
            both @ self.down.weight,
            both @ self.gate[0],
            self.out.weight[0],
            self.out.bias[0],
        )

    def score(self, normed: Tensor) -> Tensor:
        """Probability of agreement [...]."""
        return self.forward(normed).float().sigmoid()
