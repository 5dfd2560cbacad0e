"""The tensors of a GGUF file: which there are, in what kind of numbers, and where they come from.

A tensor is read when it is written, so that only one is in memory as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import nn

from multirate.errors import UserError
from multirate.loading.gguf.file import GgufFile
from multirate.loading.gguf.writing.keys import architecture_for, rope_tensors

_BLOCK = 32  # inputs of a block of Q8_0, Q4_0 and Q4_1
_HALF_MAX = 65504.0
_GROUP = 1 << 20
"""Values quantised at once by a thread. The package quantises 16 rows at a time, so rows are joined
to 1/16 of it.
"""


@dataclass(frozen=True)
class Source:
    """A tensor to be written. shape: in torch's order; values: reads it, float32; content: its
    bytes as they are in another GGUF file, if it is not changed.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    values: Callable[[], np.ndarray]
    content: Callable[[], np.ndarray] | None = None

    @property
    def bytes(self) -> int:
        """Of the tensor in the file."""
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape)) // block * size

    def written(self) -> np.ndarray:
        """The tensor's bytes in the file, uint8 [bytes]. UserError for values that are not finite,
        or too large for float16.
        """
        if self.content is not None:
            return self.content()
        values = self.values()
        if not np.isfinite(values.sum(dtype=np.float64)):
            raise UserError(f"tensor {self.name} holds values that are not finite")
        if self.kind == Kind.F16 and np.abs(values).max() > _HALF_MAX:
            raise UserError(
                f"tensor {self.name} holds values above {_HALF_MAX:.0f}, the most that float16 "
                "has; use --type bf16 or q8_0"
            )
        return quantised(values, self.kind)


def sources_of_model(model: nn.Module, config: Any, wanted: Kind) -> list[Source]:
    """The tensors of a transformers model's file, matrices as `wanted` where they can be."""
    architecture = architecture_for(config)
    number = next(n for n, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)

    def source(name: str, parameter: nn.Parameter) -> Source:
        stem, _, leaf = name.rpartition(".")
        found = names.get_name(stem)
        if found is None:
            raise UserError(f"files of architecture {architecture!r} have no place for {name}")
        target, shape = f"{found}.{leaf}", tuple(parameter.shape)

        def values() -> np.ndarray:
            value = parameter.detach().float().cpu().numpy()
            return _as_written(value, target, architecture, config)

        return Source(target, shape, _kind(target, shape, wanted), values)

    matrices = [source(name, parameter) for name, parameter in model.named_parameters()]
    ropes = [
        Source(name, value.shape, Kind.F32, lambda value=value: value)  # type: ignore[misc]
        for name, value in rope_tensors(config).items()
    ]
    return [*ropes, *matrices]


def sources_of_file(file: GgufFile, wanted: Kind) -> list[Source]:
    """The tensors of another GGUF file, matrices as `wanted` where they can be."""

    def source(name: str) -> Source:
        tensor = file.tensors[name]
        kind = _kind(name, tensor.shape, wanted)
        same = kind == tensor.kind
        return Source(
            name,
            tensor.shape,
            kind,
            lambda: file.values(name),
            (lambda: file.content(name)) if same else None,
        )

    return [source(name) for name in file.tensors]


def quantised(values: np.ndarray, kind: Kind) -> np.ndarray:
    """float32 values as a GGUF file holds them, uint8 [bytes]. Rows are whole blocks."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    if kind == Kind.BF16:  # the package takes minutes for what torch does in seconds
        return torch.from_numpy(flat).bfloat16().view(torch.uint8).numpy()
    out = np.empty(flat.size // block * size, np.uint8)

    def part(begin: int) -> None:
        some = flat[begin : begin + _GROUP]
        joined = _GROUP // 16 if some.size % (_GROUP // 16) == 0 else block
        rows = gguf.quantize(some.reshape(-1, joined), kind)
        at = begin // block * size
        out[at : at + some.size // block * size] = rows.view(np.uint8).reshape(-1)

    with ThreadPoolExecutor(torch.get_num_threads()) as workers:
        for _ in workers.map(part, range(0, flat.size, _GROUP)):
            pass
    return out


def quantised_kinds(file: GgufFile) -> list[str]:
    """The names of the quantisations that a file has already."""
    plain = (Kind.F32, Kind.F16, Kind.BF16, Kind.F64)
    return sorted({one.kind.name for one in file.tensors.values() if one.kind not in plain})


def _kind(name: str, shape: tuple[int, ...], wanted: Kind) -> Kind:
    """As llama.cpp's quantiser chooses: one-dimensional tensors and routers stay float32, and the
    embedding and the output, to which a text is most sensitive, have at least 8 bits.
    """
    if len(shape) < 2 or "ffn_gate_inp" in name or not name.endswith(".weight"):
        return Kind.F32
    if wanted in (Kind.F16, Kind.BF16):
        return wanted
    if shape[-1] % _BLOCK:
        return Kind.F16
    return Kind.Q8_0 if name in ("token_embd.weight", "output.weight") else wanted


def _as_written(value: np.ndarray, name: str, architecture: str, config: Any) -> np.ndarray:
    """A parameter as llama.cpp has it: Llama's queries and keys are ordered for its rotation of
    neighbouring dimensions, and Gemma's norms have the 1 added that transformers adds later.
    """
    if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        halves = value.reshape(heads, 2, -1, *value.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return value + np.float32(1)
    return value
