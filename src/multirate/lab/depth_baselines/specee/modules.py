"""SpecEE's proposer and predictors.

The proposer [ours: the paper's is EAGLE's head] reads the token that is about to be run and the
residual that the token before it left with, both at a mean square of one:

    z = [e / rms(e); h / rms(h)];   p = A z + U · silu(D z);   candidates = top 4 of head(norm(p))

A predictor at an exit reads 12 features of the 4 candidates: their logits there, the softmax of
these, and its change since the exit that was looked at before (0 at the first):

    s = sigmoid(w · relu(W f + b) + c), the probability that the exit's argmax is one of them and
    the last layer's
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multirate.lab.depth_baselines._shared.multi_exit import TrainedExits
from multirate.lab.depth_baselines.specee.config import SpecEEConfig
from multirate.methods._shared.least_squares import direction
from multirate.methods._shared.shape import BaseShape

EPS = 1e-6
CANDIDATES = 4
LOGIT_UNIT = 16.0
"""Logits are read in this unit, beside probabilities. [ours]"""


class Proposer(nn.Module):
    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * size, size, bias=False)
        self.down = nn.Linear(2 * size, rank, bias=False)
        self.up = nn.Linear(rank, size, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, read: Tensor) -> Tensor:
        """What `read_of` gives [..., 2 d] → what the final norm and the head read [..., d],
        float32.
        """
        read = read.to(self.linear.weight.dtype)
        out: Tensor = (self.linear(read) + self.up(F.silu(self.down(read)))).float()
        return out


def read_of(embedded: Tensor, before: Tensor) -> Tensor:
    """The proposer's input: a token's residual entering layer 0 and the one that the token before
    it left with, both [..., d] → [..., 2 d].
    """
    return torch.cat([direction(embedded.float(), EPS), direction(before.float(), EPS)], dim=-1)


def features(logits: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """The candidates' logits [..., 4], and their probabilities where they were looked at before
    (None: nowhere) → features [..., 12], and their probabilities here [..., 4].
    """
    here = logits.softmax(-1)
    change = torch.zeros_like(here) if before is None else here - before
    return torch.cat([logits / LOGIT_UNIT, here, change], dim=-1), here


class SpecEE(TrainedExits):
    """Proposer and predictors. first_exits [exits] int64: at which exits the training data's tokens
    could leave first.
    """

    first_exits: Tensor

    def __init__(self, config: SpecEEConfig, base: BaseShape) -> None:
        super().__init__(config, base)
        self.proposer = Proposer(base.hidden_size, config.rank)
        count = len(config.exits)
        self.weight = nn.Parameter(torch.empty(count, config.width, 3 * CANDIDATES).uniform_(-1, 1))
        self.bias = nn.Parameter(torch.zeros(count, config.width))
        self.out = nn.Parameter(torch.zeros(count, config.width))
        self.out_bias = nn.Parameter(torch.zeros(count))
        self.register_buffer("first_exits", torch.zeros(count, dtype=torch.int64))

    def judge(self, which: int, read: Tensor) -> Tensor:
        """Logits of s [n] at the exit of place `which`, of features [n, 12]."""
        inner = F.linear(read, self.weight[which], self.bias[which]).relu()
        return inner @ self.out[which] + self.out_bias[which]

    def hot(self, count: int) -> tuple[int, ...]:
        """The `count` exits that the training data's tokens could leave at first most often."""
        order = self.first_exits.argsort(dim=-1, descending=True, stable=True)[:count].tolist()
        return tuple(sorted(self.exits[which] for which in order))
