"""Optimizers and the learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from multirate.training.muon import Muon
from multirate.training.settings import TrainSettings

HEAD = "head.weight"
"""A draft head of a module's own, which starts as the base's and is nearly right …"""
HEAD_SHARE = 0.1
"""… so that it gets this share of the learning rate."""
FINAL_SHARE = 0.05
"""Share of the learning rate at the end of the cosine schedule."""
WEIGHT_DECAY = 0.01


def optimizers(module: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon on matrices, and AdamW on vectors and on a draft head (no decay on those). A group with
    a "share" has this share of the rate.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    trained = [p for name, p in named if name != HEAD]
    matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": [p], "share": HEAD_SHARE} for name, p in named if name == HEAD
    ]
    groups += [{"params": vectors}] if vectors else []
    return [Muon(matrices, lr=lr, weight_decay=WEIGHT_DECAY)] + [
        torch.optim.AdamW([group], lr=lr, betas=(0.9, 0.95), weight_decay=0.0) for group in groups
    ]


def learning_rate(step: int, settings: TrainSettings) -> float:
    """Linear warm-up, then a cosine to FINAL_SHARE of the peak. ``step`` counts from 0."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    falling = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return settings.lr * (FINAL_SHARE + (1 - FINAL_SHARE) * falling)
