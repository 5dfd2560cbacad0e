"""Which precision a training run multiplies in on this device."""

from __future__ import annotations

import functools
import time

import torch

_SIZE = 512  # of the square matrices that are multiplied to find out
_REPEATS = 5
_CLEARLY = 1.2  # times as fast: fp32 is the more exact one


def low_precision(device: torch.device) -> torch.dtype:
    """bfloat16 if the hardware multiplies it faster than float32, else float32.

    A CPU is measured once per process (some hundredths of a second), because its instruction set
    does not show it. GFLOP/s in bf16 and fp32: 16 and 150 without such instructions (they are
    emulated); 72 and 110 on a core of an Intel server whose AMX the virtual machine hides.
    """
    if device.type == "cpu":
        return torch.bfloat16 if _bf16_is_faster() else torch.float32
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float32
    return torch.bfloat16


@functools.cache
def _bf16_is_faster() -> bool:
    # private to torch, so a release without it means fp32: slower at worst, never wrong
    if not getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)():
        return False
    return _seconds(torch.bfloat16) * _CLEARLY < _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    """The fastest of some products of two matrices."""
    square = torch.zeros(_SIZE, _SIZE, dtype=dtype, device="cpu")
    torch.mm(square, square)  # the first one of a shape is prepared
    taken = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        torch.mm(square, square)
        taken.append(time.perf_counter() - begin)
    return min(taken)
