"""Weights laid out once for the kernel: groups of 64 outputs, input pairs interleaved."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from multirate.model.native import abi, library

GROUP = 64
BF16, INT16, INT12, INT8, W8A8, W8A16, W4A8, W4A16 = (
    abi.constant(f"WEIGHTS_{name}")
    for name in ("BF16", "INT16", "INT12", "INT8", "W8A8", "W8A16", "W4A8", "W4A16")
)
FINER_ROWS = {W8A8: W8A16, W4A8: W4A16}
"""Layouts of the same weights for rows of two times 8 bits."""
W8_BLOCK: int = abi.constant("W8_BLOCK")


def padded(count: int) -> int:
    return -(-count // GROUP) * GROUP


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


_PART = 256  # outputs, of which caches hold all that is made on the way


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
    integers, scales = _room_for_half_bytes(weight)
    for begin in range(0, len(weight), _PART):
        here = slice(begin, begin + _PART)
        steps, units, _ = _in_steps(weight[here].reshape(-1, W8_BLOCK), 15)
        integers[here], scales[here] = (
            steps.view(integers[here].shape),
            units.view(scales[here].shape),
        )
    return integers, scales


def _room_for_half_bytes(weight: Tensor) -> tuple[Tensor, Tensor]:
    outputs, inputs = weight.shape
    return (
        torch.empty(outputs, inputs, dtype=torch.uint8),
        torch.empty(outputs, inputs // W8_BLOCK, 2, dtype=torch.float16),
    )


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


def half_bytes(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """As `half_bytes_by_block`, of weights [out, in] that are numbers of 4 bits, as those of a
    quantised file are; None: they are not.
    """
    if weight.shape[1] % W8_BLOCK:
        return None
    integers, scales = _room_for_half_bytes(weight)
    for begin in range(0, len(weight), _PART):  # most other weights are told by the first part
        here = slice(begin, begin + _PART)
        part = weight[here]
        integers[here], scales[here] = half_bytes_by_block(part)
        unit, least = scales[here].float()[:, :, None].unbind(dim=3)
        found = unit * integers[here].view(len(part), -1, W8_BLOCK) + least
        if not (found.view(part.shape) - part).norm() <= HALF_BYTES * part.norm():
            return None
    return integers, scales


def exact_layout() -> int:
    """The layout of weights that the model's own results come from: 16 bits, as this processor
    multiplies them fastest.
    """
    return INT16 if library.kernel().mr_fixed_point() else BF16


def draft_layout(weights: str) -> int:
    """The layout of layers and heads that only draft, and so need not be exact. weights: "int4",
    "int8", or "bf16" for 16 bits. Processors that multiply no bytes have 8 bits for 4, those that
    multiply no integers have 16 bits alone.
    """
    if weights == "int4" and byte_products():
        return W4A16
    narrow = weights != "bf16" and library.kernel().mr_integer_products()
    return INT8 if narrow else exact_layout()


def mixing_layout(weights: str) -> int:
    """The same of the small products by which a draft's residuals are mixed: 8 bits at least, as 4
    cost them more than they save (docs/experiments.md).
    """
    return draft_layout("int8" if weights == "int4" else weights)


def byte_products() -> bool:
    """Whether layers may be packed as W8A8 on this processor."""
    return bool(library.kernel().mr_byte_products())


def screened() -> bool:
    """Whether heads have a `Screen` on this processor."""
    return byte_products() and exact_layout() == INT16


def screening_norms(weight: Tensor, rows: int = 4096) -> tuple[Tensor, Tensor]:
    """Of a head [out, in], as it is packed in 16 and in 8 bits, [out] each: the norm of what the
    two differ by, and of the latter; both rounded up (see screen.c).
    """
    error, norm = torch.empty(len(weight)), torch.empty(len(weight))
    for begin in range(0, len(weight), rows):
        here = slice(begin, begin + rows)
        part = weight[here].detach().float()
        fixed, unit = fixed_point(part)
        integers, units = bytes_by_block(part)
        scale = units.float().repeat_interleave(W8_BLOCK, dim=1)[:, : part.shape[1]]
        copied = integers.float() * scale
        error[here] = (fixed.float() * unit[:, None] - copied).norm(dim=1)
        norm[here] = copied.norm(dim=1)
    return (error * 1.0001).nan_to_num(nan=torch.inf), (norm * 1.0001).nan_to_num(nan=torch.inf)


SLAB = 32 << 20
HUGE_PAGE = 2 << 20


def large_pages(size: int) -> mmap.mmap:
    """Memory of this process alone, on large pages where the system has them. Memory that may be
    shared, as Python's mmap is unless told otherwise, has none on most systems.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, size)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: small pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


class Slabs:
    """Memory for packed weights in large blocks that the system may back with huge pages.

    A pass reads every weight once: with 4 KiB pages each 64th line starts with a page walk, a long
    one in a virtual machine (measured: docs/experiments.md).
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of ``tensor``, aligned to cache lines."""
        size = tensor.numel() * tensor.element_size()
        taken = -(-size // 64) * 64
        if self._free.numel() < taken:
            block = large_pages(max(SLAB, taken) + HUGE_PAGE)
            self._free = torch.frombuffer(block, dtype=torch.uint8)
            self._free = self._free[-self._free.data_ptr() % HUGE_PAGE :]
        place, self._free = self._free[:size], self._free[taken:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


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


@dataclass
class Owner:
    """Keeps alive every tensor whose address a C structure holds. layout: of the weights that it
    packs; None: `exact_layout()`. half_bytes: those that are numbers of 4 bits are W4A8, whatever
    `layout` says. twelve_bits: where weights of INT16 fit into INT12, they are packed so: the same
    results from fewer bytes. saved_bytes: how many, of all weights so far.
    """

    layout: int | None = None
    half_bytes: bool = False
    twelve_bits: bool = True
    saved_bytes: int = 0
    tensors: list[object] = field(default_factory=list)
    slabs: Slabs = field(default_factory=Slabs)

    def address(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self.tensors.append(tensor)
        return tensor.data_ptr()

    def floats(self, tensor: Tensor | None) -> int | None:
        return (
            None
            if tensor is None
            else self.address(tensor.detach().float().cpu().contiguous().clone())
        )

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> abi.CData:
        """weight [out, in], bias [out] → the kernel's form, as the sources that multiply it draw
        it.

        Outputs are padded with zeros to whole groups.
        """
        outputs, inputs = weight.shape
        if inputs % 2:
            raise library.NativeUnavailable(
                f"a linear layer with an odd number of inputs ({inputs})"
            )
        full = torch.zeros(padded(outputs), inputs)
        full[:outputs] = weight.detach().to(device="cpu", dtype=torch.float32)
        layout = exact_layout() if self.layout is None else self.layout
        told_again = half_bytes(full) if self.half_bytes else None
        if told_again and layout != W4A16:
            layout = W4A8
        elif layout == W4A16 and inputs % W8_BLOCK:
            layout = INT8
        scale = short = None
        if layout == INT16:
            full, scale = fixed_point(full)
            if self.twelve_bits and inputs % 8 == 0 and library.kernel().mr_int12_products():
                short = eight_bits(full)
        if short:
            layout, packed = INT12, _three_lines(*short)
            self.saved_bytes += full.numel() // 2
        elif layout == BF16:
            packed = full.to(torch.bfloat16).view(-1, 4, 16, inputs // 2, 2).permute(0, 3, 1, 2, 4)
        elif layout in (W8A8, W8A16):
            full, units = bytes_by_block(full)
            full = (full + 128).to(torch.uint8)  # as the instruction takes them
            packed = full.view(-1, 4, 16, inputs // 4, 4).permute(0, 1, 3, 2, 4)
            scale = units.view(-1, 16, units.shape[1]).transpose(1, 2).contiguous()
        elif layout in (W4A8, W4A16):
            full, scales = told_again or nearest_half_bytes(full)
            halves = full.view(len(full), -1, 2, 4)
            full = halves[:, :, 0] + 16 * halves[:, :, 1]  # [out, in / 8, 4]
            packed = full.view(-1, 4, 16, inputs // 8, 4).permute(0, 1, 3, 2, 4)
            scale = scales.view(-1, 16, *scales.shape[1:]).permute(0, 2, 3, 1).contiguous()
        else:
            if layout == INT8:
                full, scale = fixed_point(full, torch.int8)
            packed = full.view(-1, 4, 16, inputs // 2, 2).permute(0, 1, 3, 2, 4)
        if bias is not None:
            wide = torch.zeros(padded(outputs))
            wide[:outputs] = bias.detach().float()
            bias = wide
        weights = self.address(self.slabs.copy(packed))
        return abi.new(
            "Linear",
            weight=weights,
            bias=self.address(bias),
            scale=self.address(scale),
            inputs=inputs,
            outputs=padded(outputs),
            format=layout,
        )

    def screen(self, weight: Tensor, bias: Tensor | None) -> abi.CData:
        """A head's copy that screens its tokens."""
        norms = torch.zeros(2, padded(len(weight)))
        norms[:, : len(weight)] = torch.stack(screening_norms(weight))
        return abi.new(
            "Screen",
            linear=replace(self, layout=W8A8).linear(weight, bias)[0],
            error=self.address(norms[0]),
            norm=self.address(norms[1]),
        )

    def low_rank(self, a: Tensor | None, b: Tensor | None, silu: bool = False) -> abi.CData:
        """a [rank, in], b [out, rank] → B(A x); the rank is padded to whole groups."""
        if a is None or b is None:
            return abi.new("LowRank")
        down, up = self.bottleneck(a, b)
        return abi.new("LowRank", a=down, b=up, rank=a.shape[0], silu=int(silu))

    def bottleneck(self, down: Tensor, up: Tensor) -> tuple[abi.CData, abi.CData]:
        """down [rank, in], up [out, rank], one after the other: a product's outputs are whole
        groups, and the next one reads all of them.
        """
        wide = torch.zeros(up.shape[0], padded(down.shape[0]), dtype=up.dtype)
        wide[:, : down.shape[0]] = up.detach()
        return self.linear(down), self.linear(wide)


def interleave_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """[I, …] twice → [2I, …]: 32 rows of gate, the same 32 rows of up, and so on (one group
    each).
    """
    pieces: Sequence[Tensor] = [gate.unflatten(0, (-1, 32)), up.unflatten(0, (-1, 32))]
    return torch.stack(list(pieces), dim=1).flatten(0, 2)
