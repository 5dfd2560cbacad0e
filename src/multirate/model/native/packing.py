"""Weights laid out once for the kernel: groups of 64 outputs, input pairs interleaved."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from multirate.model.native import abi, library
from multirate.model.quantised import QuantisedWeight, Weight, dense

GROUP = 64
BF16, INT16, INT12, INT8, W8A8, W8A16, W4A8, W4A16 = (
    abi.constant(f"WEIGHTS_{name}")
    for name in ("BF16", "INT16", "INT12", "INT8", "W8A8", "W8A16", "W4A8", "W4A16")
)
FINER_ROWS = {W8A8: W8A16, W4A8: W4A16}
"""Layouts of the same weights for rows of two times 8 bits."""
W8_BLOCK: int = abi.constant("W8_BLOCK")
_BITS = {BF16: 16, INT16: 16, INT12: 12, INT8: 8, W8A8: 8, W8A16: 8, W4A8: 4, W4A16: 4}
# inputs of a layout's smallest piece, of which a layer has whole ones
_INPUTS = dict.fromkeys((BF16, INT16, INT8), 2) | {
    INT12: 8,
    **dict.fromkeys((W8A8, W8A16), 4),
    **dict.fromkeys((W4A8, W4A16), W8_BLOCK),
}


def padded(count: int) -> int:
    return -(-count // GROUP) * GROUP


def _scales(layout: int, outputs: int, inputs: int) -> Tensor | None:
    """Room for the scales of a layer's weights, as the sources that multiply these draw them."""
    blocks = -(-inputs // W8_BLOCK)
    if layout == BF16:
        return None
    if layout in (W8A8, W8A16):
        return torch.empty(outputs // 16, blocks, 16, dtype=torch.bfloat16, device="cpu")
    if layout in (W4A8, W4A16):
        return torch.empty(outputs // 16, blocks, 2, 16, dtype=torch.float16, device="cpu")
    return abi.floats_for(outputs)


def exact_layout() -> int:
    """The layout of weights that the model's own results come from: 16 bits, as this processor
    multiplies them fastest.
    """
    return INT16 if library.kernel().mr_integer_products() else BF16


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
    cost them more than they save (lab/notes/weight-formats.md).
    """
    return draft_layout("int8" if weights == "int4" else weights)


def byte_products() -> bool:
    """Whether layers may be packed as W8A8 on this processor."""
    return bool(library.kernel().mr_byte_products())


def screened() -> bool:
    """Whether heads have a `Screen` on this processor."""
    return byte_products()


def packed_bytes(weights: int, head: int) -> int:
    """What so many weights take when packed for the model's own results, and a head's screen."""
    layout = exact_layout()
    twelve = layout == INT16 and library.kernel().mr_int12_products()
    return weights * _BITS[INT12 if twelve else layout] // 8 + (head if screened() else 0)


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
    one in a virtual machine (lab/notes/decode-loop.md).
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8, device="cpu")

    def room(self, size: int) -> Tensor:
        """So many bytes that are not taken yet, aligned to cache lines."""
        if self._free.numel() < _lines(size):
            block = large_pages(max(SLAB, _lines(size)) + HUGE_PAGE)
            self._free = torch.frombuffer(block, dtype=torch.uint8)
            self._free = self._free[-abi.address(abi.tensor(self._free)) % HUGE_PAGE :]
        return self._free[:size]

    def take(self, size: int) -> Tensor:
        """The first bytes of `room`, which nobody else gets."""
        place = self.room(size)
        self._free = self._free[_lines(size) :]
        return place

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of ``tensor``, aligned to cache lines."""
        place = self.take(tensor.numel() * tensor.element_size())
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _lines(size: int) -> int:
    """Bytes of the cache lines that so many are in."""
    return -(-size // 64) * 64


def _unpacked(weight: Tensor) -> tuple[abi.CData, Tensor]:
    """weight [out, in] as the kernel reads it, and the tensor that it lies in."""
    held = weight.detach().cpu()
    if held.dtype != torch.bfloat16:
        held = held.float()
    held = held.contiguous()
    outputs, inputs = held.shape
    wide = held.dtype == torch.float32
    return abi.new(
        "Unpacked", values=abi.tensor(held), wide=wide, outputs=outputs, inputs=inputs
    ), held


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
    workspace: library.Workspace | None = None
    slabs: Slabs = field(default_factory=Slabs)

    def address(self, tensor: Tensor | None) -> abi.CData:
        """Where a tensor lies that stays alive; NULL for None."""
        self.tensors += [] if tensor is None else [tensor]
        return abi.tensor(tensor)

    def floats(self, tensor: Tensor | None) -> abi.CData:
        """The same of an fp32 copy."""
        if tensor is None:
            return abi.NULL
        return self.address(tensor.detach().float().cpu().contiguous().clone())

    def _packed(self, memory: Tensor | None) -> abi.CData:
        """The same of what `linear` has packed."""
        self.tensors += [] if memory is None else [memory]
        return abi.packed(memory)

    # -- Until the kernel reads blocks: quantised weights are expanded here, and nowhere else ------

    def linear(self, parts: Weight | Sequence[Weight], bias: Tensor | None = None) -> abi.CData:
        """parts: a weight [out, in], or several, whose outputs come one below another; bias [out] →
        the kernel's form, as the sources that multiply it draw it.

        Outputs are padded with zeros to whole groups. UserError for a weight that holds no numbers.
        """
        if isinstance(parts, (Tensor, QuantisedWeight)):
            return self._linear(dense(parts), bias)
        tensors = [dense(part) for part in parts]
        wide = any(one.dtype != torch.bfloat16 for one in tensors)
        return self._linear(torch.cat([one.float() if wide else one for one in tensors]), bias)

    def gate_up(self, gate: Weight, up: Weight) -> abi.CData:
        """Gates and ups [I, in] as one linear layer, as the kernel reads them."""
        return self.linear(interleave_gate_up(dense(gate), dense(up)))

    def table(self, embedding: Weight) -> abi.CData:
        """Where the rows of the input embedding [V, d] lie."""
        return self.address(dense(embedding, torch.bfloat16).contiguous())

    # ----------------------------------------------------------------------------------------------

    def _linear(self, weight: Tensor, bias: Tensor | None) -> abi.CData:
        outputs, inputs = weight.shape
        unpacked, _held = _unpacked(weight)
        for layout, nearest in self._attempts(inputs):
            size = padded(outputs) * inputs * _BITS[layout] // 8
            place, scale = self.slabs.room(size), _scales(layout, padded(outputs), inputs)
            fits = library.kernel().mr_pack(
                self._kernel_workspace(),
                unpacked,
                layout,
                nearest,
                abi.packed(place),
                abi.packed(scale),
            )
            if fits:
                break
        else:
            raise library.NativeUnavailable(f"weights that do not fit the layout {layout}")
        weights = self._packed(self.slabs.take(size))
        if layout == INT12:
            self.saved_bytes += padded(outputs) * inputs // 2
        if bias is not None:
            wide = torch.zeros(padded(outputs), dtype=torch.float32, device="cpu")
            wide[:outputs] = bias.detach().float()
            bias = wide
        return abi.new(
            "Linear",
            weight=weights,
            bias=self.address(bias),
            scale=self._packed(scale),
            inputs=inputs,
            outputs=padded(outputs),
            format=layout,
        )

    def _attempts(self, inputs: int) -> list[tuple[int, bool]]:
        """Layouts that a layer may be packed as, the first that its weights fit into, and whether
        they become the nearest numbers that do; the last one takes any. NativeUnavailable for a
        number of inputs that it does not take.
        """
        layout, found = exact_layout() if self.layout is None else self.layout, []
        if layout == W4A16 and inputs % _INPUTS[layout]:
            layout = INT8
        if inputs % _INPUTS[layout]:
            raise library.NativeUnavailable(
                f"a linear layer with {inputs} inputs, which is not a multiple of {_INPUTS[layout]}"
            )
        if self.half_bytes and not inputs % _INPUTS[W4A8]:
            found.append((layout if layout == W4A16 else W4A8, False))
        twelve = self.twelve_bits and not inputs % _INPUTS[INT12]
        if layout == INT16 and twelve and library.kernel().mr_int12_products():
            found.append((INT12, False))
        return [*found, (layout, True)]

    def _kernel_workspace(self) -> abi.CData:
        if self.workspace is None:
            self.workspace = library.Workspace()
        return self.workspace.address

    def screen(self, weight: Tensor, bias: Tensor | None) -> abi.CData:
        """A head's copy that screens its tokens."""
        norms = torch.zeros(2, padded(len(weight)), dtype=torch.float32, device="cpu")
        unpacked, _held = _unpacked(weight)
        library.kernel().mr_screening_norms(
            self._kernel_workspace(),
            unpacked,
            abi.tensor(norms[0]),
            abi.tensor(norms[1]),
        )
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
        wide = torch.zeros(up.shape[0], padded(down.shape[0]), dtype=up.dtype, device=up.device)
        wide[:, : down.shape[0]] = up.detach()
        return self.linear(down), self.linear(wide)


def interleave_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """[I, …] twice → [2I, …]: 32 rows of gate, the same 32 rows of up, and so on (one group
    each).
    """
    pieces: Sequence[Tensor] = [gate.unflatten(0, (-1, 32)), up.unflatten(0, (-1, 32))]
    return torch.stack(list(pieces), dim=1).flatten(0, 2)
