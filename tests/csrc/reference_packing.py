"""What csrc/pack.c does with a model's weights, in plain PyTorch: their integers, and how these are
laid out.
"""

from __future__ import annotations

import gguf
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from multirate.runtime.native.formats import BF16, INT12, INT16, Q8_0, WeightFormat
from multirate.runtime.native.packing import Owner, padded

WEIGHT_NORM = 65000.0
"""Largest norm of an output's int16 weights: with fixed_point.c's ROW_NORM no sum leaves int32."""


def fixed_point(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] → int16 [out, in] and float32 units [out] with weight ≈ unit · integers (see
    fixed_point.c).

    In units of powers of two: weights that are bf16 numbers become integers of eight significant
    bits, which WEIGHTS_INT12 takes.
    """
    norm, largest = weight.norm(dim=1), weight.abs().amax(dim=1)
    steps = torch.minimum(WEIGHT_NORM / norm.clamp(min=1e-30), 32767 / largest.clamp(min=1e-30))
    steps = torch.where(largest > 0, steps, torch.ones_like(steps))
    steps = torch.ldexp(torch.ones_like(steps), torch.frexp(steps).exponent - 1)
    return (weight * steps[:, None]).round().to(torch.int16), 1 / steps


def eight_bits(integers: Tensor) -> tuple[Tensor, Tensor] | None:
    """int16 integers as size · 2^shift and a sign: sizes uint8, and codes uint8, shift + 8 · sign,
    shift at most 7. None where any has more than eight significant bits.
    """
    sizes = integers.int().abs()
    shifts = (torch.frexp(sizes.float()).exponent - 8).clamp(min=0)
    short = sizes >> shifts
    if not torch.equal(short << shifts, sizes):
        return None
    return short.to(torch.uint8), (shifts + 8 * (integers < 0)).to(torch.uint8)


def screening_norms(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of a head [out, in], as it is packed in 16 and in 8 bits, [out] each: the norm of what the
    two differ by, and of the latter.
    """
    fixed, unit = fixed_point(weight)
    blocks = Owner().quantised(weight, Q8_0).blocks()
    copied = torch.from_numpy(gguf.dequantize(blocks, GGMLQuantizationType.Q8_0)).double()
    return (fixed.double() * unit[:, None] - copied).norm(dim=1), copied.norm(dim=1)


def _three_lines(sizes: Tensor, codes: Tensor) -> Tensor:
    """What `eight_bits` found of [outputs, inputs], as fixed_point.c draws WEIGHTS_INT12."""
    inputs = sizes.shape[1]
    # [groups, 4, inputs / 8, lines a b and c d, 16 outputs, 2 inputs, line of two]
    order = (0, 1, 3, 4, 2, 6, 5)
    parts = [
        tensor.view(-1, 4, 16, inputs // 8, 2, 2, 2).permute(order) for tensor in (sizes, codes)
    ]
    first, second = parts[1].unbind(dim=-1)
    both = (first + 16 * second).flatten(-2)  # [groups, 4, inputs / 8, 2, 32]
    return torch.cat([parts[0].flatten(3), both.transpose(-1, -2).flatten(3)], dim=3)


def packed(weight: Tensor, format: WeightFormat) -> tuple[Tensor, Tensor | None]:
    """weight [out, in] as the kernel reads it, and `Linear.scale`."""
    outputs, inputs = weight.shape
    full = torch.zeros(padded(outputs), inputs)
    full[:outputs] = weight
    if format == BF16:
        pairs = full.to(torch.bfloat16).view(-1, 4, 16, inputs // 2, 2)
        return pairs.permute(0, 3, 1, 2, 4), None
    integers, units = fixed_point(full)
    if format == INT12:
        short = eight_bits(integers)
        assert short is not None
        return _three_lines(*short), units
    assert format == INT16
    return integers.view(-1, 4, 16, inputs // 2, 2).permute(0, 1, 3, 2, 4), units
