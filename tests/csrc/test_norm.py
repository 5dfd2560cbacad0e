"""RMSNorm and rotary position embedding (csrc/norm.c) against PyTorch."""

from __future__ import annotations

import pytest
import torch

from multirate.runtime.native import library

from . import reference
from .harness import pointer, randn


@pytest.mark.parametrize("width", [16, 80, 128, 250])
def test_rms_norm(width: int) -> None:
    x, weight = randn(width) * 3, randn(width, seed=1)
    exact = reference.rms_norm(x.double(), weight.double(), 1e-5)
    library.kernel().mr_rms_norm(pointer(x), pointer(weight), width, 1e-5)
    assert torch.allclose(x.double(), exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("width", [16, 32, 48, 80, 128])
def test_rotate(width: int) -> None:
    x, angle = randn(width), randn(width // 2, seed=1) * 4
    cos, sin = angle.cos(), angle.sin()
    exact = reference.rotate(x.double(), cos.double(), sin.double())
    library.kernel().mr_rotate(pointer(x), pointer(cos), pointer(sin), width)
    assert torch.allclose(x.double(), exact, rtol=2e-6, atol=1e-6)
