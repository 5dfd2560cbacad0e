"""What csrc/pack.c does with a model's weights, in plain PyTorch: their integers, and how these are
laid out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from multirate.model.native.packing import (
    BF16,
    INT8,
    INT12,
    INT16,
    W4A8,
    W4A16,
    W8_BLOCK,
    W8A8,
    W8A16,
    padded,
)

WEIGHT_NORM = 65000.0
"""Largest norm of an output's int16 weights: with fixed_point.c's ROW_NORM no sum leaves int32."""


def fixed_point(weight: Tensor, integers: torch.dtype = torch.int16) -> tuple[Tensor, Tensor]:
    """[out, in] → int16 or int8 [out, in] and float32 units [out] with weight ≈ unit · integers
    (see fixed_point.c).

    int16 in units of powers of two: weights that are bf16 numbers become integers of eight
    significant bits, which WEIGHTS_INT12 takes.
    """
    norm, largest = weight.norm(dim=1), weight.abs().amax(dim=1)
    most = torch.iinfo(integers).max
    steps = torch.minimum(WEIGHT_NORM / norm.clamp(min=1e-30), most / largest.clamp(min=1e-30))
    steps = torch.where(largest > 0, steps, torch.ones_like(steps))
    if integers == torch.int16:
        steps = torch.ldexp(torch.ones_like(steps), torch.frexp(steps).exponent - 1)
    return (weight * steps[:, None]).round().to(integers), 1 / steps


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


def bytes_by_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] → integers from -127 to 127 as int16 [out, in], and bf16 units [out, blocks] of
    each W8_BLOCK inputs with weight ≈ unit · integer (see w8a8.c).
    """
    outputs, inputs = weight.shape
    blocks = -(-inputs // W8_BLOCK)
    whole = torch.zeros(outputs, blocks * W8_BLOCK)
    whole[:, :inputs] = weight
    parts = whole.view(outputs, blocks, W8_BLOCK)
    units = (parts.abs().amax(dim=2) / 127).to(torch.bfloat16)
    steps = units.float().clamp(min=1e-30)[:, :, None]
    integers = (parts / steps).round().clamp(-127, 127).to(torch.int16)
    return integers.view(outputs, -1)[:, :inputs].contiguous(), units


HALF_BYTES = 2.0**-8
"""Weights are taken for numbers of 4 bits where these are so near, relative to the norms: rounding
them to bf16, as a quantised file's are when they are read, alone is 0.0014.
"""


def half_bytes_by_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] → integers from 0 to 15 as uint8 [out, in], and fp16 [out, blocks, 2] of each
    W8_BLOCK inputs, a unit and a least weight, with weight ≈ unit · integer + least (see w4a8.c).

    Of weights that were made so, the unit is found again: from the least to the largest of a block
    are 15 steps, or, where it had not all sixteen numbers, fewer.
    """
    parts = weight.reshape(-1, W8_BLOCK)
    steps, scales, lacking = _in_steps(parts, 15)
    for count in range(14, 0, -1):
        coarse = (lacking > HALF_BYTES * parts.norm(dim=1)).nonzero()[:, 0]
        if not len(coarse):
            break
        others, units, rest = _in_steps(parts[coarse], count)
        better = rest < lacking[coarse]
        coarse = coarse[better]
        steps[coarse], scales[coarse] = others[better], units[better]
        lacking[coarse] = rest[better]
    return steps.view(weight.shape), scales.view(len(weight), -1, 2)


def nearest_half_bytes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """As `half_bytes_by_block`, of weights that are no such numbers: the nearest ones."""
    steps, units, _ = _in_steps(weight.reshape(-1, W8_BLOCK), 15)
    return steps.view(weight.shape), units.view(len(weight), -1, 2)


def _in_steps(parts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks [n, W8_BLOCK] in `count` steps from the least to the largest → integers, (unit, least)
    [n, 2] in fp16, and the norm of what they lack [n].
    """
    least, most = parts.amin(dim=1, keepdim=True), parts.amax(dim=1, keepdim=True)
    unit = (most - least) / count
    for _ in range(2):  # by least squares: what the weights were before they were rounded
        steps = ((parts - least) / unit.clamp(min=1e-30)).round().clamp(0, 15)
        middle, mean = steps.mean(dim=1, keepdim=True), parts.mean(dim=1, keepdim=True)
        spread = (steps - middle).square().mean(dim=1, keepdim=True)
        common = ((steps - middle) * (parts - mean)).mean(dim=1, keepdim=True)
        unit = torch.where(spread > 0, common / spread.clamp(min=1e-9), unit)
        least = mean - unit * middle
    scales = torch.cat([unit, least], dim=1).to(torch.float16)
    unit, least = scales.float().split(1, dim=1)
    steps = ((parts - least) / unit.clamp(min=1e-30)).round().clamp(0, 15)
    return steps.to(torch.uint8), scales, (unit * steps + least - parts).norm(dim=1)


def screening_norms(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of a head [out, in], as it is packed in 16 and in 8 bits, [out] each: the norm of what the
    two differ by, and of the latter.
    """
    fixed, unit = fixed_point(weight)
    integers, units = bytes_by_block(weight)
    scale = units.float().repeat_interleave(W8_BLOCK, dim=1)[:, : weight.shape[1]]
    copied = integers.double() * scale
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


def packed(weight: Tensor, layout: int, nearest: bool = True) -> tuple[Tensor, Tensor | None]:
    """weight [out, in] as the kernel reads it, and `Linear.scale`. nearest: of four bits, whether
    weights become the nearest such numbers, or the units that they were made with are found again.
    """
    outputs, inputs = weight.shape
    full = torch.zeros(padded(outputs), inputs)
    full[:outputs] = weight
    if layout == BF16:
        pairs = full.to(torch.bfloat16).view(-1, 4, 16, inputs // 2, 2)
        return pairs.permute(0, 3, 1, 2, 4), None
    if layout in (W8A8, W8A16):
        full, units = bytes_by_block(full)
        lines = (full + 128).to(torch.uint8).view(-1, 4, 16, inputs // 4, 4)
        return lines.permute(0, 1, 3, 2, 4), units.view(-1, 16, units.shape[1]).transpose(1, 2)
    if layout in (W4A8, W4A16):
        full, scales = nearest_half_bytes(full) if nearest else half_bytes_by_block(full)
        halves = full.view(len(full), -1, 2, 4)
        lines = (halves[:, :, 0] + 16 * halves[:, :, 1]).view(-1, 4, 16, inputs // 8, 4)
        scales = scales.view(-1, 16, *scales.shape[1:]).permute(0, 2, 3, 1)
        return lines.permute(0, 1, 3, 2, 4), scales
    integers, units = fixed_point(full, torch.int8 if layout == INT8 else torch.int16)
    if layout == INT12:
        short = eight_bits(integers)
        assert short is not None
        return _three_lines(*short), units
    assert layout in (INT8, INT16)
    return integers.view(-1, 4, 16, inputs // 2, 2).permute(0, 1, 3, 2, 4), units
