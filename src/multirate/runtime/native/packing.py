"""Weights laid out once for the kernel, in columns of 16 outputs and groups of 64."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from multirate.errors import UserError
from multirate.runtime.native import abi, library
from multirate.runtime.native.formats import (
    COLUMN,
    INT12,
    INT16,
    Q8_0,
    WeightFormat,
    format_named,
    screened,
)
from multirate.runtime.quantised import QuantisedWeight, Weight, dense, in_blocks

GROUP = 64
HALF_GROUP = 32  # outputs of gates, and then of ups, in a group of both


@dataclass(frozen=True)
class Run:
    """Outputs that lie together in a packed layer: rows [begin, begin + count) of a part. Whole
    columns.
    """

    part: int
    begin: int
    count: int


def gates_and_ups(count: int) -> list[Run]:
    """So many gates, part 0, and as many ups, part 1, in the order in which they are packed."""
    return [
        Run(part, begin, HALF_GROUP) for begin in range(0, count, HALF_GROUP) for part in (0, 1)
    ]


def padded(count: int) -> int:
    return -(-count // GROUP) * GROUP


def packed_bytes(weights: int, head: int) -> int:
    """What so many weights of floats take when packed, and a head's screen."""
    bits = 12 if library.kernel().mr_int12_products() else 16
    return weights * bits // 8 + (head if screened() else 0)


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

    def __init__(self, first: Tensor | None = None) -> None:
        """first: memory to take before any other, uint8, aligned to cache lines."""
        none = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._free = none if first is None else first

    def room(self, size: int) -> Tensor:
        """So many bytes that are not taken yet, aligned to cache lines."""
        if self._free.numel() < lines(size):
            block = large_pages(max(SLAB, lines(size)) + HUGE_PAGE)
            self._free = torch.frombuffer(block, dtype=torch.uint8)
            self._free = self._free[-abi.address(abi.tensor(self._free)) % HUGE_PAGE :]
        return self._free[:size]

    def take(self, size: int) -> Tensor:
        """The first bytes of `room`, which nobody else gets."""
        place = self.room(size)
        self._free = self._free[lines(size) :]
        return place

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of ``tensor``, aligned to cache lines."""
        place = self.take(tensor.numel() * tensor.element_size())
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def lines(size: int) -> int:
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
    """Packs weights, and keeps alive every tensor whose address a C structure holds.

    format: what weights of floats are packed as; None: INT16. Blocks stay what they are.
    twelve_bits: where weights of INT16 fit into INT12, they are packed so: the same results from
    fewer bytes. saved_bytes: how many, of all weights of floats so far, beside two bytes for each.
    """

    format: WeightFormat | None = None
    twelve_bits: bool = True
    saved_bytes: int = 0
    tensors: list[object] = field(default_factory=list)
    workspace: library.Workspace | None = None
    slabs: Slabs = field(default_factory=Slabs)
    slabs_of_scales: Slabs = field(default_factory=Slabs)

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
        """The same of what a packing function has written."""
        self.tensors += [] if memory is None else [memory]
        return abi.packed(memory)

    def linear(self, weight: Weight | Sequence[Weight], bias: Tensor | None = None) -> abi.CData:
        """weight [out, in], or several of the same inputs, one below another, and bias [out] of all
        → the kernel's form. Outputs are padded with zeros to whole groups.
        """
        parts = [weight] if isinstance(weight, Tensor | QuantisedWeight) else list(weight)
        return self._linear(parts, [Run(i, 0, len_of(part)) for i, part in enumerate(parts)], bias)

    def gate_up(self, gate: Weight, up: Weight) -> abi.CData:
        """Gates [I, in] and ups [I, in], by turns 32 of each, so that a group has both."""
        return self._linear([gate, up], gates_and_ups(len_of(gate)), None)

    def _linear(
        self, parts: Sequence[Weight], runs: Sequence[Run], bias: Tensor | None
    ) -> abi.CData:
        parts = [self._as_packed(part) for part in parts]
        outputs, inputs = sum(run.count for run in runs), int(parts[0].shape[1])
        if all(isinstance(part, Tensor) for part in parts):
            fields = self._floats([part for part in parts if isinstance(part, Tensor)], runs)
        elif len({getattr(part, "format", None) for part in parts}) == 1:
            blocks = [part for part in parts if isinstance(part, QuantisedWeight)]
            fields = self._blocks(blocks, runs)
        else:
            fields = self._columns(parts, runs, inputs)
        if bias is not None:
            wide = torch.zeros(padded(outputs), dtype=torch.float32, device="cpu")
            wide[:outputs] = bias.detach().float()
            bias = wide
        return abi.new(
            "Linear", **fields, bias=self.address(bias), inputs=inputs, outputs=padded(outputs)
        )

    def _as_packed(self, part: Weight) -> Weight:
        """Floats as blocks, if that is how they are packed and the inputs are whole ones. A file's
        floats as a tensor.
        """
        if not in_blocks(part):
            part = dense(part)
        if not isinstance(part, Tensor) or self.format is None or not self.format.quantised:
            return part
        return part if part.shape[1] % self.format.piece else self.quantised(part, self.format)

    def quantised(self, weight: Tensor, to: WeightFormat) -> QuantisedWeight:
        """weight [out, in] as blocks of one of `formats.QUANTISABLE`."""
        from gguf import GGMLQuantizationType

        unpacked, _held = _unpacked(weight)
        outputs, inputs = weight.shape
        made = np.empty((outputs, to.row_bytes(inputs)), np.uint8)
        library.kernel().mr_quantise(self._kernel_workspace(), unpacked, to.number, abi.flags(made))
        return QuantisedWeight("of a layer", GGMLQuantizationType[to.name], (outputs, inputs), made)

    def _floats(self, parts: Sequence[Tensor], runs: Sequence[Run]) -> dict[str, object]:
        """Tensors as 16 bits a weight, or 12 if these will do → fields of a Linear."""
        whole = parts[0].detach()
        if len(runs) > 1:
            whole = torch.cat(
                [parts[run.part].detach()[run.begin : run.begin + run.count] for run in runs]
            )
        outputs, inputs = padded(len(whole)), int(whole.shape[1])
        unpacked, _held = _unpacked(whole)
        for layout in self._attempts(inputs):
            size = layout.weight_bytes(outputs, inputs)
            place = self.slabs.room(size)
            scale = torch.empty(
                layout.scale_bytes(outputs, inputs), dtype=torch.uint8, device="cpu"
            )
            if library.kernel().mr_pack(
                self._kernel_workspace(),
                unpacked,
                layout.number,
                abi.packed(place),
                abi.packed(scale),
            ):
                break
        self.saved_bytes += 2 * outputs * inputs - size
        return {
            "weight": self._packed(self.slabs.take(size)),
            "scale": self._packed(scale if len(scale) else None),
            "format": layout.number,
        }

    def _attempts(self, inputs: int) -> list[WeightFormat]:
        """Formats that floats may be packed as, the first that they fit into; the last one takes
        any. NativeUnavailable for a number of inputs that it does not take.
        """
        wanted = INT16 if self.format is None or self.format.quantised else self.format
        if inputs % wanted.piece:
            raise library.NativeUnavailable(
                f"a linear layer with {inputs} inputs, which is not a multiple of {wanted.piece}"
            )
        twelve = self.twelve_bits and wanted == INT16 and not inputs % INT12.piece
        return [INT12, wanted] if twelve and library.kernel().mr_int12_products() else [wanted]

    def _blocks(self, parts: Sequence[QuantisedWeight], runs: Sequence[Run]) -> dict[str, object]:
        """Blocks of one kind, as they are → fields of a Linear."""
        layout = _format_of(parts[0])
        inputs, held = parts[0].shape[1], [part.blocks() for part in parts]
        outputs = sum(run.count for run in runs)
        rows = np.zeros(padded(outputs), np.uintp)
        np.concatenate(
            [_addresses(held[run.part], run.begin, run.count) for run in runs], out=rows[:outputs]
        )
        size = layout.weight_bytes(len(rows), inputs)
        place = self.slabs.room(size)
        scale = self.slabs_of_scales.room(layout.scale_bytes(len(rows), inputs))
        bad = library.kernel().mr_pack_rows(
            self._kernel_workspace(),
            abi.ffi.from_buffer("void *[]", rows),
            len(rows),
            inputs,
            layout.number,
            abi.packed(place),
            abi.packed(scale),
        )
        draft = self.format is not None and self.format.quantised
        if bad >= 0 and not draft:  # in a draft it shows, and drafting stops
            part, row = _row_of(runs, bad)
            raise UserError(
                f"{parts[part].place} is damaged: a scale of its row {row} is not finite; download "
                "or convert the model again"
            )
        return {
            "weight": self._packed(self.slabs.take(size)),
            "scale": self._packed(self.slabs_of_scales.take(scale.numel())),
            "format": layout.number,
        }

    def _columns(
        self, parts: Sequence[Weight], runs: Sequence[Run], inputs: int
    ) -> dict[str, object]:
        """Parts of several formats, each packed by itself, and where each column lies → fields of a
        Linear.
        """
        whole = [Run(0, 0, 0)] * len(parts)
        columns = abi.ffi.new("Column[]", padded(sum(run.count for run in runs)) // COLUMN)
        packed = []
        for i, part in enumerate(parts):
            whole[i] = Run(0, 0, len_of(part))
            fields = (
                self._floats([part], [whole[i]])
                if isinstance(part, Tensor)
                else self._blocks([part], [whole[i]])
            )
            packed.append(abi.new("Linear", **fields, inputs=inputs, outputs=padded(len_of(part))))
        at = 0
        for run in runs:
            for column in range(run.begin // COLUMN, (run.begin + run.count) // COLUMN):
                library.kernel().mr_column(packed[run.part], column, columns + at)
                at += 1
        self.tensors.append(columns)
        return {"columns": columns, "format": packed[0].format}

    def table(self, embedding: Weight, head: abi.CData | None = None) -> abi.CData:
        """The embedding [vocab, hidden]: bf16 as it is, or blocks packed as a layer. head: the
        model's, if it has the same weights.
        """
        vocab = len_of(embedding)
        if not in_blocks(embedding):
            rows = dense(embedding, torch.bfloat16).detach().cpu().contiguous()
            return abi.new("Table", rows=self.address(rows), vocab=vocab)
        packed = self.linear(embedding) if head is None else head
        return abi.new("Table", packed=packed[0], vocab=vocab)

    def _kernel_workspace(self) -> abi.CData:
        if self.workspace is None:
            self.workspace = library.Workspace()
        return self.workspace.address

    def screen(self, weight: Tensor, bias: Tensor | None) -> abi.CData:
        """A head's copy that screens its tokens; NULL if its weights are too large for one."""
        norms = torch.zeros(2, padded(len(weight)), dtype=torch.float32, device="cpu")
        unpacked, _held = _unpacked(weight)
        library.kernel().mr_screening_norms(
            self._kernel_workspace(),
            unpacked,
            abi.tensor(norms[0]),
            abi.tensor(norms[1]),
        )
        if not norms.isfinite().all():
            return abi.NULL
        return abi.new(
            "Screen",
            linear=replace(self, format=Q8_0).linear(weight, bias)[0],
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


def len_of(weight: Weight) -> int:
    """The outputs of a weight."""
    return int(weight.shape[0])


def _format_of(part: QuantisedWeight) -> WeightFormat:
    found = format_named(part.format)
    assert found is not None, part.format  # files with other kinds are refused when they are read
    return found


def _addresses(blocks: np.ndarray, begin: int, count: int) -> np.ndarray:
    """Where rows [begin, begin + count) begin."""
    first, step = blocks.ctypes.data, blocks.strides[0]
    return (first + step * np.arange(begin, begin + count)).astype(np.uintp)


def _row_of(runs: Sequence[Run], output: int) -> tuple[int, int]:
    """The part and row of a packed output."""
    for run in runs:
        if output < run.count:
            return run.part, run.begin + output
        output -= run.count
    raise IndexError(output)


def interleave_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """[I, …] twice → [2I, …]: 32 rows of gate, the same 32 rows of up, and so on (one group
    each).
    """
    pieces: Sequence[Tensor] = [gate.unflatten(0, (-1, 32)), up.unflatten(0, (-1, 32))]
    return torch.stack(list(pieces), dim=1).flatten(0, 2)
