"""Weights that stay quantised: their blocks lie in a GGUF file, or in memory where a model was
quantised on load, and become numbers only where something other than the kernel needs them.

The module whose weight this is keeps an empty parameter (on the meta device) for its shape, and the
QuantisedWeight as its attribute `quantised`.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from multirate.errors import UserError, say_once

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""Formats of GGUF whose blocks the kernel multiplies with."""
FLOATS = ("BF16", "F16", "F32")
"""Formats that the kernel packs as 16-bit weights."""
ON_LOAD = ("q8_0", "q4_0", "q4_1")
"""Formats that a model of transformers can be quantised to."""
CHOICES = ("file", "bf16", *ON_LOAD)
"""What `weights` may be: as they are in the file, expanded, or quantised on load."""
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_GROUP_VALUES = 8192
"""The package gguf dequantises 16 rows at a time: short rows are joined to about so many values,
which takes half as long.
"""
_READ = 4 << 20  # bytes of one read
_CHUNK_VALUES = 1 << 22
"""Values in float32 at once while a large weight is dequantised."""


class FileBytes:
    """An open file. Its bytes are read, not mapped: mapped pages would count as memory of this
    process. `size`: in bytes, as it was opened.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self.descriptor)
        self._stamp = self._stamp_now()
        self.size = self._stamp[0]

    def read(self, begin: int, end: int) -> np.ndarray:
        """Bytes [begin, end), uint8. UserError if the file is not the one that was opened."""
        found = np.empty(end - begin, np.uint8)
        done = 0
        try:
            while part := os.pread(self.descriptor, min(len(found) - done, _READ), begin + done):
                found[done : done + len(part)] = np.frombuffer(part, np.uint8)
                done += len(part)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UserError(f"cannot read {self.path}: {reason}") from None
        if done < len(found) or self._stamp_now() != self._stamp:
            raise UserError(f"{self.path} changed while it was read; load the model again")
        return found

    def _stamp_now(self) -> tuple[int, int]:
        now = os.fstat(self.descriptor)
        return now.st_size, now.st_mtime_ns


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """A matrix in blocks. `weight[rows]` is a part of it, or its rows in another order."""

    name: str
    """Of the tensor in its file, or of the parameter that was quantised."""
    kind: GGMLQuantizationType
    shape: tuple[int, int]
    """Outputs and inputs; the inputs are cut into blocks."""
    source: FileBytes | np.ndarray
    """A file, or the blocks, uint8 [rows, row_bytes]."""
    begin: int = 0
    """Where the tensor begins in its file."""
    rows: np.ndarray | None = None
    """Which rows of the source these are, int64 [rows]; None: all, in order."""

    def __deepcopy__(self, memo: Any) -> QuantisedWeight:
        return self  # nothing in it changes

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> QuantisedWeight:
        """rows: a slice or an index [n]."""
        chosen = np.asarray(rows, np.int64) if not isinstance(rows, slice) else rows
        every = np.arange(len(self), dtype=np.int64) if self.rows is None else self.rows
        found = every[chosen]
        return replace(self, rows=found, shape=(len(found), self.shape[-1]))

    @property
    def row_bytes(self) -> int:
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size

    @property
    def nbytes(self) -> int:
        """What its blocks take."""
        return len(self) * self.row_bytes

    @property
    def format(self) -> str:
        """Such as "Q4_1"."""
        return self.kind.name

    @property
    def place(self) -> str:
        """How error messages call it."""
        if isinstance(self.source, FileBytes):
            return f"{self.source.path}: tensor {self.name}"
        return f"weight {self.name}"

    def blocks(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows [start, stop) in the format's own blocks, uint8 [rows, row_bytes]. Raises UserError
        as FileBytes.read.
        """
        wanted = range(len(self))[start:stop]
        if self.rows is None:
            return self._stored(wanted.start, wanted.stop)
        rows = self.rows[wanted.start : wanted.stop]
        if not len(rows):
            return self._stored(0, 0)
        first, last = int(rows.min()), int(rows.max()) + 1
        if last - first > 4 * len(rows):  # a few rows from all over
            return np.concatenate([self._stored(row, row + 1) for row in rows.tolist()])
        found = self._stored(first, last)
        in_order = len(rows) == len(found) and bool((np.diff(rows) == 1).all())
        return found if in_order else found[rows - first]

    def _stored(self, start: int, stop: int) -> np.ndarray:
        if not isinstance(self.source, FileBytes):
            return self.source[start:stop]
        size = self.row_bytes
        return self.source.read(self.begin + start * size, self.begin + stop * size).reshape(
            stop - start, size
        )

    def dequantise(self, dtype: torch.dtype, rows: Any = None) -> Tensor:
        """Its numbers, or those of some rows (as in `weight[rows]`). Raises UserError for values
        that are not finite, and as FileBytes.read.
        """
        if rows is not None:
            return self[rows].dequantise(dtype)
        count, inputs = self.shape
        found = torch.empty(count, inputs, dtype=dtype, device="cpu")
        step = max(16, _CHUNK_VALUES // inputs)
        for start in range(0, count, step):
            values = dequantised(self.blocks(start, start + step), self.kind)
            # one sum instead of a look at every value: anything infinite makes it so
            if not np.isfinite(values.sum(dtype=np.float64)):
                raise UserError(
                    f"{self.place} is damaged: it holds values that are not finite; download the "
                    "model again"
                )
            found[start : start + step] = torch.from_numpy(values)
        return found

    def values_at(self, index: np.ndarray) -> np.ndarray:
        """The numbers at places of the flattened weight, float32 like `index` [n]."""
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        row, column = np.divmod(index, self.shape[-1])
        row = row if self.rows is None else self.rows[row]
        at = row * self.row_bytes + column // block * size
        if isinstance(self.source, FileBytes):
            read = self.source.read
            places = (self.begin + at).tolist()
            blocks = np.stack([read(place, place + size) for place in places])
        else:
            flat = self.source.reshape(-1)
            blocks = np.stack([flat[place : place + size] for place in at.tolist()])
        return dequantised(blocks, self.kind)[np.arange(len(index)), column % block]


Weight = Tensor | QuantisedWeight


def dequantised(blocks: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Rows of blocks, uint8 [n, row_bytes] → float32 [n, inputs]."""
    import gguf

    if kind.name == "F32":
        return blocks.view(np.float32)
    if kind.name == "F16":
        return blocks.view(np.float16).astype(np.float32)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    inputs = blocks.shape[1] // size * block
    joined = max(1, _GROUP_VALUES // max(inputs, 1))
    while len(blocks) % joined:
        joined -= 1
    whole = blocks.reshape(len(blocks) // joined, -1)
    with np.errstate(all="ignore"):  # what is not finite is the caller's to find
        found: np.ndarray = gguf.dequantize(whole, kind)
    return found.reshape(len(blocks), inputs)


def weight_of(module: Any) -> Weight:
    """The weight of a linear layer or an embedding, wherever it is."""
    held: Tensor = module.weight
    found = vars(module).get("quantised")
    return found if held.is_meta and isinstance(found, QuantisedWeight) else held.detach()


def dense(weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """The weight as a tensor. dtype: None: as it is, and of quantised weights the narrowest that
    the kernel packs without loss (bfloat16, and float32 of a 16- or 32-bit format).
    """
    if isinstance(weight, QuantisedWeight):
        wide = weight.format in ("F16", "F32")
        return weight.dequantise(dtype or (torch.float32 if wide else torch.bfloat16))
    return weight if dtype is None else weight.to(dtype)


def in_blocks(weight: Weight) -> bool:
    """Whether the kernel multiplies its blocks; a file's floats and tensors it packs as floats."""
    return isinstance(weight, QuantisedWeight) and weight.format in BLOCKS


def split(weight: Weight, sizes: Sequence[int]) -> list[Weight]:
    """Consecutive rows, so many in each part."""
    ends = np.cumsum([0, *sizes]).tolist()
    return [weight[start:stop] for start, stop in pairwise(ends)]


def quantised_weights(model: nn.Module) -> dict[str, QuantisedWeight]:
    """The weights of a model that are quantised, by the names of their parameters."""
    modules = dict(model.named_modules())
    found = {}
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        if parameter.is_meta and leaf == "weight":
            weight = weight_of(modules[path])
            if isinstance(weight, QuantisedWeight):
                found[name] = weight
    return found


def is_quantised(model: nn.Module) -> bool:
    return any(True for _ in _quantised_modules(model))


def _quantised_modules(model: nn.Module) -> Iterator[nn.Module]:
    marked = (module for module in model.modules() if "quantised" in vars(module))
    return (module for module in marked if isinstance(weight_of(module), QuantisedWeight))


def put(model: nn.Module, weights: Mapping[str, QuantisedWeight], dtype: torch.dtype) -> None:
    """Makes these the weights of the model's parameters with these names, and of those tied to
    them. dtype: that their empty parameters have.
    """
    modules = dict(model.named_modules())
    empty: dict[int, tuple[nn.Parameter, QuantisedWeight]] = {}
    for name, weight in weights.items():
        old = modules[name.rpartition(".")[0]].weight
        like = torch.empty(weight.shape, dtype=dtype, device="meta")
        empty[id(old)] = nn.Parameter(like, requires_grad=False), weight
    for module in modules.values():
        found = empty.get(id(module._parameters.get("weight")))
        if found is not None:
            module.weight, module.quantised = found


def quantised_copy(model: Any, weights: str) -> Any:
    """A copy of a model that is not quantised, its linear layers and embeddings in blocks, in
    memory; it shares everything else that is bfloat16, or a float32 vector. weights: of ON_LOAD.
    Embedding and head have 8 bits at least, as in llama.cpp's files, and a matrix whose rows are no
    whole blocks stays as it is.
    """
    import gguf

    if is_quantised(model):
        raise UserError(f"weights is {weights!r}, but the model is quantised already")
    twin = _shared_copy(model)
    ends = (twin.get_input_embeddings(), twin.get_output_embeddings())
    names = {id(parameter): name for name, parameter in twin.named_parameters()}
    found: dict[str, QuantisedWeight] = {}
    for module in (*ends, *twin.modules()):
        name = names.get(id(getattr(module, "weight", None)))
        if name is None or name in found or not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        kind = gguf.GGMLQuantizationType["Q8_0" if module in ends else weights.upper()]
        if module.weight.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            blocks = quantised_blocks(module.weight, kind)
            found[name] = QuantisedWeight(name, kind, (len(blocks), module.weight.shape[1]), blocks)
    put(twin, found, torch.bfloat16)
    _cast(twin, lambda held: torch.float32 if held.ndim < 2 else torch.bfloat16)
    twin.config.dtype = torch.bfloat16
    return twin


def quantised_blocks(tensor: Tensor, kind: GGMLQuantizationType) -> np.ndarray:
    """A matrix [rows, inputs] in blocks, uint8 [rows, row_bytes]."""
    import gguf

    found: np.ndarray = gguf.quantize(tensor.detach().cpu().float().numpy(), kind)
    return found


def _shared_copy(model: Any) -> Any:
    """Other modules with the same tensors."""
    held = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in held})


def _cast(model: nn.Module, dtype_of: Callable[[Tensor], torch.dtype]) -> None:
    """Gives each parameter the dtype that it should have; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is None or old.is_meta or old.dtype == dtype_of(old):
                continue
            if id(old) not in made:
                made[id(old)] = nn.Parameter(old.detach().to(dtype_of(old)), requires_grad=False)
            module._parameters[name] = made[id(old)]


def formats(model: nn.Module) -> dict[str, int]:
    """How many tensors the model has in each format of GGUF, the most frequent first; without a
    mixture's experts that are on disk.
    """
    quantised = quantised_weights(model)
    found = Counter(
        quantised[name].format
        if name in quantised
        else _DTYPES.get(held.dtype, str(held.dtype).removeprefix("torch."))
        for name, held in model.named_parameters()
        if name in quantised or not held.is_meta
    )
    return dict(found.most_common())


def formats_line(model: nn.Module) -> str:
    """The same in words, such as "Q4_1 210 tensors, F32 61, Q8_0 1"."""
    (first, count), *others = formats(model).items()
    parts = [f"{first} {count} tensor{'s' * (count > 1)}", *(f"{f} {n}" for f, n in others)]
    return ", ".join(parts)


def weight_bytes(model: nn.Module) -> int:
    """What the model's parameters take, quantised ones in their blocks."""
    quantised = quantised_weights(model)
    return sum(
        quantised[name].nbytes if name in quantised else held.numel() * held.element_size()
        for name, held in model.named_parameters()
    )


def device_of(model: nn.Module) -> torch.device:
    """Where the model's weights are: quantised ones are on the CPU."""
    held = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
    return next(held, torch.device("cpu"))


def expanded(model: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A copy of a quantised model whose weights are all tensors, of this dtype, for whatever runs
    the model's own modules; the model itself where nothing is quantised.
    """
    if not is_quantised(model):
        return model
    twin = _shared_copy(model)
    expand(twin, dtype)
    return twin


def expand(model: Any, dtype: torch.dtype = torch.bfloat16) -> None:
    """Makes the weights of a quantised model tensors of this dtype."""
    quantised = {id(module.weight): weight_of(module) for module in _quantised_modules(model)}
    if not quantised:
        return
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as workers:
        tensors = workers.map(lambda weight: dense(weight, dtype), quantised.values())
        made = {
            key: nn.Parameter(tensor, requires_grad=False)
            for key, tensor in zip(quantised, tensors, strict=True)
        }
    for module in list(_quantised_modules(model)):
        module.weight = made[id(module.weight)]
        del module.quantised
    _cast(model, lambda held: dtype if held.is_floating_point() else held.dtype)
    model.config.dtype = dtype


_TWINS: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()


def runnable(model: Any) -> Any:
    """The model, or the expanded copy of a quantised one, made once: for comparisons with
    transformers' own loop.
    """
    if not is_quantised(model):
        return model
    if model not in _TWINS:
        say_once("expanding a copy of the quantised weights to bfloat16 for transformers' own code")
        _TWINS[model] = expanded(model)
    return _TWINS[model]
