"""A cheap fingerprint of a base model's weights: which model an accelerator was trained for."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

SAMPLES = 64


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """sha256 (first 32 hex digits) over name, shape and 64 evenly spaced values of every parameter.

    Values are hashed after rounding to bf16, so an fp32 model and its bf16 cast have the same
    fingerprint; another revision (any tensor trained on) has another one. Reads a few kilobytes,
    whatever the model's size. The experts of a
    mixture do not count (only the rest of it does, routers included): they may be on disk.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if ".experts." in name:
            continue
        flat = parameter.detach().reshape(-1)
        index = torch.linspace(
            0,
            max(flat.numel() - 1, 0),
            min(SAMPLES, flat.numel()),
            dtype=torch.float64,
            device="cpu",
        ).long()
        values = flat[index.to(flat.device)].to(device="cpu", dtype=torch.bfloat16)
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]
