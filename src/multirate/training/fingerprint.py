"""A cheap fingerprint of a base model's weights: which model an accelerator was trained for."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from multirate.runtime.quantised import quantised_weights

SAMPLES = 64


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """sha256 (first 32 hex digits) over name, shape and 64 evenly spaced values of every parameter.

    Values are hashed after rounding to bf16, so an fp32 model and its bf16 cast have the same
    fingerprint; another revision (any tensor trained on) has another one. Reads a few kilobytes,
    whatever the model's size. Quantised weights count with the numbers they stand for, so a GGUF
    file has one fingerprint, expanded or not. The experts of a mixture do not count (only the rest
    of it does, routers included): they may be on disk.
    """
    digest, quantised = hashlib.sha256(), quantised_weights(model)
    for name, parameter in sorted(model.named_parameters()):
        if ".experts." in name:
            continue
        size = parameter.numel()
        last, samples = max(size - 1, 0), min(SAMPLES, size)
        index = torch.linspace(0, last, samples, dtype=torch.float64, device="cpu").long()
        if name in quantised:
            values = torch.from_numpy(quantised[name].values_at(index.numpy()))
        else:
            values = parameter.detach().reshape(-1)[index.to(parameter.device)]
        values = values.to(device="cpu", dtype=torch.bfloat16)
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]
