"""Where a family keeps its experts on disk, and how one expert becomes a record of the store.

A record for transformers holds one expert's slices of the parameters that transformers' experts
module has (`gate_up_proj [2I, H]`, `down_proj [H, I]`; GPT-OSS transposed, with biases), so that a
slot of memory is computed with as it was read. packed.py has the records for the kernel.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from multirate.errors import UserError
from multirate.experts.shards import Shards
from multirate.runtime.finite import first_not_finite

ALIGNMENT = 4096  # what O_DIRECT asks of offsets, lengths and buffers, whatever the device
FIELD_ALIGNMENT = 64
MODULE, NATIVE = "module", "native"
"""A record's numbers as transformers' experts module has them, or as the kernel reads them."""
_ROLES = {
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "down_proj": "down",
    "w2": "down",
}
_SEPARATE = re.compile(
    r"(?:^|\.)layers\.(\d+)\..*\bexperts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$"
)
_FUSED = re.compile(r"(?:^|\.)layers\.(\d+)\..*\bexperts\.((?:gate_up_proj|down_proj)(?:_bias)?)$")
_QUANTISED = re.compile(r"\bexperts\..*(?:_blocks|_scales|\.qweight|\.weight_scale.*)$")
FIELDS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


@dataclass(frozen=True)
class Field:
    """One parameter slice inside a record: `offset` in bytes from the record's start."""

    name: str
    shape: tuple[int, ...]
    offset: int


def whole_pages(size: int) -> int:
    """Bytes of a record with so many in it; the end is padding."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class RecordFormat:
    """What every record of a store for transformers holds; `bytes` of each."""

    dtype: torch.dtype
    fields: tuple[Field, ...]
    bytes: int

    @staticmethod
    def of(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> RecordFormat:
        """The record of these parameter slices, in the order of FIELDS."""
        fields, at = [], 0
        for name in (n for n in FIELDS if n in shapes):
            fields.append(Field(name, shapes[name], at))
            size = torch.Size(shapes[name]).numel() * dtype.itemsize
            at += -(-size // FIELD_ALIGNMENT) * FIELD_ALIGNMENT
        return RecordFormat(dtype, tuple(fields), whole_pages(at))

    @property
    def weights(self) -> str:
        """The name of the dtype."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters, by name."""
        return {field.name: field.shape for field in self.fields}

    def write(self, values: dict[str, Tensor], into: Tensor) -> None:
        """Fills the record `into` [bytes] uint8 from {field: tensor}; padding becomes zero."""
        into.zero_()
        for name, view in self.tensors(0, into).items():
            view.copy_(values[name])

    def tensors(self, row: int, record: Tensor) -> dict[str, Tensor]:
        """The fields of a record [bytes] uint8, as tensors that share its memory; the same of every
        row.
        """
        found = {}
        for field in self.fields:
            size = torch.Size(field.shape).numel() * self.dtype.itemsize
            found[field.name] = (
                record[field.offset : field.offset + size].view(self.dtype).view(field.shape)
            )
        return found


class ExpertTensors:
    """The experts of a checkpoint: which layers have them, how many, and each one's parameter
    slices.

    Raises UserError for a checkpoint without experts, with quantised ones, or with gaps.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._separate: dict[int, dict[int, dict[str, str]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        self._fused: dict[int, dict[str, str]] = defaultdict(dict)
        self.tensor_names: set[str] = set()
        for name in shards.names():
            if _QUANTISED.search(name):
                raise UserError(
                    f"{shards.folder}: {name} is quantised; accepted: experts in bfloat16, "
                    "float16 or float32 (load the model, dequantise its weights and save it "
                    "first)"
                )
            if match := _SEPARATE.search(name):
                self._separate[int(match[1])][int(match[2])][_ROLES[match[3]]] = name
            elif match := _FUSED.search(name):
                self._fused[int(match[1])][match[2]] = name
            else:
                continue
            self.tensor_names.add(name)
        if not self.tensor_names:
            raise UserError(
                f"{shards.folder} has no experts to pack; accepted: mixture-of-experts models "
                "whose tensors are named layers.N.….experts.E.{gate,up,down}_proj, "
                "….experts.E.{w1,w2,w3}, or ….experts.{gate_up,down}_proj"
            )
        self.layers = sorted({*self._separate, *self._fused})
        self.num_experts = self._count()
        self.format = self._format()

    def _count(self) -> int:
        counts = {
            layer: self._shards.shape(self._fused[layer]["gate_up_proj"])[0]
            if layer in self._fused
            else len(self._separate[layer])
            for layer in self.layers
        }
        if len(set(counts.values())) != 1:
            raise UserError(
                f"{self._shards.folder}: layers have different numbers of experts ({counts})"
            )
        count = next(iter(counts.values()))
        for layer, experts in self._separate.items():
            for expert in range(count):
                lacking = {"gate", "up", "down"} - experts.get(expert, {}).keys()
                if lacking:
                    raise UserError(
                        f"{self._shards.folder}: expert {expert} of layer {layer} has no "
                        f"{min(lacking)}"
                    )
        return count

    def _format(self) -> RecordFormat:
        values = self._read(self.layers[0], 0)
        dtype = values["down_proj"].dtype
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise UserError(
                f"{self._shards.folder}: experts are {dtype}; accepted: bfloat16, float16 and "
                "float32"
            )
        return RecordFormat.of({name: tuple(value.shape) for name, value in values.items()}, dtype)

    def expert(self, layer: int, expert: int) -> dict[str, Tensor]:
        """One expert's slices of the experts module's parameters, by parameter name. UserError for
        values that are not finite, or another shape or dtype than the first expert's.
        """
        values = self._read(layer, expert)
        for name, shape in self.format.shapes.items():
            value = values.get(name)
            if value is None or tuple(value.shape) != shape or value.dtype != self.format.dtype:
                found = "nothing" if value is None else f"{value.dtype} {tuple(value.shape)}"
                raise UserError(
                    f"expert {expert} of layer {layer}: {name} is {found}; the first expert's is "
                    f"{self.format.dtype} {shape}"
                )
        wrong = first_not_finite(values.items())
        if wrong is not None:
            raise UserError(
                f"expert {expert} of layer {layer}: {wrong} holds values that are not finite, so "
                "the model's files are damaged; download them again"
            )
        return values

    def parts(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same as gate, up and down, of experts without biases."""
        values = self.expert(layer, expert)
        gate, up = values["gate_up_proj"].chunk(2)
        return gate, up, values["down_proj"]

    def _read(self, layer: int, expert: int) -> dict[str, Tensor]:
        if layer in self._fused:
            return {
                name: self._shards.tensor(full, expert) for name, full in self._fused[layer].items()
            }
        parts = {
            role: self._shards.tensor(name) for role, name in self._separate[layer][expert].items()
        }
        return {"gate_up_proj": torch.cat([parts["gate"], parts["up"]]), "down_proj": parts["down"]}
