"""Experts as the kernel multiplies them: a record is computed with where it was read to.

A record holds, one after the other and each from a cache line on,

    | gate and up | down | scales of gate and up | scales of down |

packed by the functions that pack a dense layer (runtime/native/packing.py), or gate and up each by
itself where a file has them in different formats. Formats may differ from layer to layer; every
record has the bytes of the largest. Layouts are the same on every processor; when one changes
(csrc/weights/format.h), so does the version of stores (store.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from multirate.experts.layout import whole_pages
from multirate.runtime.native import abi, library
from multirate.runtime.native.formats import BF16, COLUMN, WeightFormat
from multirate.runtime.native.packing import HALF_GROUP, Owner, Slabs, gates_and_ups, lines, padded
from multirate.runtime.quantised import Weight, dense

Formats = tuple[WeightFormat, WeightFormat, WeightFormat]
"""Of an expert's gate, up and down."""


@dataclass(frozen=True)
class _Part:
    """What is packed together, and where its weights and scales begin in a record."""

    format: WeightFormat
    outputs: int
    inputs: int
    weight: int
    scale: int

    def linear(self, record: Tensor) -> abi.CData:
        """The kernel's view of it."""
        return abi.new(
            "Linear",
            weight=abi.packed(record[self.weight :]),
            scale=abi.packed(record[self.scale :]) if self.format.quantised else abi.NULL,
            inputs=self.inputs,
            outputs=padded(self.outputs),
            format=self.format.number,
        )


@dataclass(frozen=True)
class PackedRecords:
    """The records of a store: gate and up [intermediate, hidden] and down [hidden, intermediate] of
    each expert. formats: of each row (layer of the store).
    """

    hidden: int
    intermediate: int
    formats: tuple[Formats, ...]

    @cached_property
    def bytes(self) -> int:
        """Of each record."""
        return whole_pages(max(self._sizes(formats)[1] for formats in self._kinds))

    @property
    def weights(self) -> str:
        """The names of the formats, the most frequent first."""
        named = Counter(one.name for row in self.formats for one in row)
        return ", ".join(name for name, _ in named.most_common())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters of transformers' module that a record stands for."""
        return {
            "gate_up_proj": (2 * self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }

    def write(
        self, row: int, parts: Sequence[Weight], into: Tensor, work: library.Workspace
    ) -> None:
        """Fills the record `into` [bytes] uint8 with an expert's gate, up and down: blocks stay
        what they are, floats become what the row's formats say. Raises UserError for blocks that
        are no numbers.
        """
        begin, end = self._sizes(self.formats[row])
        into.zero_()
        weights, scales = Slabs(into[:begin]), Slabs(into[begin:end])
        owner = Owner(BF16, workspace=work, slabs=weights, slabs_of_scales=scales)
        gate, up, down = (
            _as_format(part, to, owner) for part, to in zip(parts, self.formats[row], strict=True)
        )
        owner.gate_up(gate, up)
        owner.linear(down)

    def experts(self, slots: Sequence[Tensor]) -> SlotExperts:
        """The kernel's views of records in these slots."""
        return SlotExperts(self, slots)

    def tensors(self, row: int, record: Tensor) -> dict[str, Tensor]:
        """A record as the parameters that it stands for, in bfloat16 on the record's device."""
        held = record.cpu()
        decoded = [
            _decoded(part, held).to(record.device) for part in self._parts(self.formats[row])
        ]
        if len(decoded) == 2:
            by_turns = decoded[0].unflatten(0, (-1, 2, HALF_GROUP)).transpose(0, 1)
            decoded = [*by_turns.flatten(1, 2), decoded[1]]
        return {"gate_up_proj": torch.cat(decoded[:2]), "down_proj": decoded[2]}

    @cached_property
    def _kinds(self) -> list[Formats]:
        return list(dict.fromkeys(self.formats))

    def _parts(self, formats: Formats) -> list[_Part]:
        gate, up, down = formats
        width, found = self.intermediate, [(down, self.hidden, self.intermediate)]
        together = [(gate, 2 * width, self.hidden)]
        apart = [(gate, width, self.hidden), (up, width, self.hidden)]
        found = [*(together if gate == up else apart), *found]
        sizes = [lines(one.weight_bytes(padded(out), into)) for one, out, into in found]
        scales = [
            lines(one.scale_bytes(padded(out), into)) if one.quantised else 0
            for one, out, into in found
        ]
        return [
            _Part(*one, sum(sizes[:i]), sum(sizes) + sum(scales[:i])) for i, one in enumerate(found)
        ]

    def _sizes(self, formats: Formats) -> tuple[int, int]:
        """Where the scales of such a record begin, and where they end."""
        parts = self._parts(formats)
        last = parts[-1]
        scale = last.format.scale_bytes(padded(last.outputs), last.inputs)
        return parts[0].scale, last.scale + (lines(scale) if last.format.quantised else 0)


class SlotExperts:
    """Slots' records as the kernel's Expert, by row: rows of the same formats share them. Lives as
    long as the slots.
    """

    def __init__(self, records: PackedRecords, slots: Sequence[Tensor]) -> None:
        self._records = records
        self._kept: list[abi.CData] = []
        made = {
            formats: abi.array("Expert", [self._expert(formats, slot) for slot in slots])
            for formats in dict.fromkeys(records.formats)
        }
        self._by_row = [made[formats] for formats in records.formats]
        self.by_row = abi.ffi.new("Expert *[]", self._by_row)

    def __len__(self) -> int:
        return len(self._by_row[0])

    def expert(self, row: int, slot: int) -> abi.CData:
        """The record in a slot, if it is of this row."""
        return self._by_row[row] + slot

    def _expert(self, formats: Formats, slot: Tensor) -> abi.CData:
        *gate_up, down = (part.linear(slot) for part in self._records._parts(formats))
        both = gate_up[0] if len(gate_up) == 1 else self._by_columns(*gate_up)
        return abi.new("Expert", gate_up=both, down=down)

    def _by_columns(self, gate: abi.CData, up: abi.CData) -> abi.CData:
        """Gates and ups that are packed apart as one layer."""
        width = self._records.intermediate
        columns = abi.ffi.new("Column[]", 2 * width // COLUMN)
        at = 0
        for run in gates_and_ups(width):
            for column in range(run.begin // COLUMN, (run.begin + run.count) // COLUMN):
                library.kernel().mr_column((gate, up)[run.part], column, columns + at)
                at += 1
        self._kept.append(columns)
        return abi.new(
            "Linear",
            columns=columns,
            inputs=gate.inputs,
            outputs=2 * width,
            format=gate.format,
        )


def _as_format(part: Weight, to: WeightFormat, owner: Owner) -> Weight:
    if not to.quantised:
        return dense(part, torch.bfloat16)
    return owner.quantised(part, to) if isinstance(part, Tensor) else part


def _decoded(part: _Part, record: Tensor) -> Tensor:
    """A part of a record on the CPU as numbers [outputs, inputs]."""
    if part.format == BF16:
        size = part.format.weight_bytes(padded(part.outputs), part.inputs)
        values = record[part.weight : part.weight + size].view(torch.bfloat16)
        groups = values.view(-1, part.inputs // 2, 4, COLUMN, 2).permute(0, 2, 3, 1, 4)
        return groups.reshape(-1, part.inputs)[: part.outputs]
    found, linear = abi.floats_for(part.outputs, part.inputs), part.linear(record)
    for output, values in enumerate(found):
        library.kernel().mr_decode_output(linear, output, abi.tensor(values))
    return found.to(torch.bfloat16)
