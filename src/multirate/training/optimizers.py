"""Optimizers and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from multirate.training.muon import Muon
from multirate.training.settings import TrainSettings

HEAD = "head.weight"
"""A draft head of a module's own, which starts as the base's."""


def optimizers(module: nn.Module, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """AdamW on everything, or Muon on matrices and AdamW on vectors (no decay on those) and on a
    draft head. A group with a "share" has this share of the rate.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    head = [p for name, p in named if name == HEAD]
    trained = [p for name, p in named if name != HEAD]
    matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    out: list[torch.optim.Optimizer] = []
    if head:
        group = {"params": head, "share": settings.head_lr}
        out.append(torch.optim.AdamW([group], lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0))
    if settings.optimizer == "muon":
        out.append(Muon(matrices, lr=settings.lr, weight_decay=settings.weight_decay))
    elif matrices:
        out.append(
            torch.optim.AdamW(
                matrices, lr=settings.lr, betas=(0.9, 0.95), weight_decay=settings.weight_decay
            )
        )
    if vectors:
        out.append(torch.optim.AdamW(vectors, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0))
    return out


def learning_rate(step: int, settings: TrainSettings) -> float:
    """Linear warm-up, then a cosine to ``final_lr`` of the peak. ``step`` counts from 0."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.lr * (
        settings.final_lr + (1 - settings.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    )
