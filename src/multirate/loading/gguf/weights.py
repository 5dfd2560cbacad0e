"""A GGUF file's tensors as the parameters of a transformers model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gguf
import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from multirate.errors import UserError
from multirate.loading.gguf.config import ROPE_FACTORS, refusing
from multirate.loading.gguf.file import GgufFile, can_dequantise
from multirate.loading.gguf.file import Tensor as FileTensor
from multirate.runtime.hf.empty import empty_model
from multirate.runtime.machine import free_memory
from multirate.runtime.quantised import BLOCKS, FLOATS, QuantisedWeight, put

EXPERTS = {
    "gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "down_proj": ("ffn_down_exps.weight",),
}
"""Parameters that hold all experts of a layer → the tensors they are made of, one below another."""


def load_weights(
    file: GgufFile,
    config: PretrainedConfig,
    dtype: torch.dtype | None = None,
    experts: bool = True,
) -> Any:
    """The causal LM of `config` with the file's weights, in evaluation mode.

    dtype: of all weights, dequantised; None: matrices stay in the file (`QuantisedWeight`), vectors
        are float32, and the little else bfloat16.
    experts: whether a mixture's experts are loaded; if not, their parameters stay empty.

    Raises UserError for a tensor that is missing, has another shape, is quantised in a way that is
    not known, holds infinite values, or that the model has no place for, and for a model that
    memory has no room for.
    """
    _check_room(file, dtype, experts)
    with refusing(file):
        model: Any = empty_model(config, dtype or torch.bfloat16)
    model.tie_weights()  # what is tied is one parameter from here on
    sources = _sources(file, model, config)
    if not experts:
        sources = {name: each for name, each in sources.items() if not _expert_tensors(name)}
    undo = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=config.to_dict())
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    left = {} if dtype is not None else _left_in_file(file, sources, undo)
    for name, weight in left.items():
        _check_shape(file, weight.shape, shapes[name], sources[name], name)
    put(model, left, torch.bfloat16)

    def parameter(name: str) -> nn.Parameter:
        with refusing(file):
            parts = [
                _checked(file, source, undo.process(file.values(source), source).weights)
                for source in sources[name]
            ]
            whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        _check_shape(file, whole.shape, shapes[name], sources[name], name)
        wanted = dtype or (torch.float32 if whole.ndim == 1 else torch.bfloat16)
        tensor = torch.from_numpy(whole).to(wanted).contiguous()
        return nn.Parameter(tensor, requires_grad=False)

    modules = dict(model.named_modules())
    rest = [name for name in sources if name not in left]
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as workers:
        for name, value in zip(rest, workers.map(parameter, rest), strict=True):
            path, _, leaf = name.rpartition(".")
            setattr(modules[path], leaf, value)
    model.tie_weights()
    return model.eval()


def _left_in_file(
    file: GgufFile, sources: Mapping[str, tuple[str, ...]], undo: TensorProcessor
) -> dict[str, QuantisedWeight]:
    """The parameters of `sources` that are one matrix of the file each. UserError for a format that
    the kernel does not run.
    """
    found = {}
    for name, tensors in sources.items():
        for tensor in (file.tensors[each] for each in tensors):
            if tensor.kind.name not in (*BLOCKS, *FLOATS):
                raise UserError(not_run(file, tensor))
        tensor = file.tensors[tensors[0]]
        if len(tensors) == 1 and len(tensor.shape) == 2:
            rows = _row_order(undo, tensor)
            if rows is not None:
                found[name] = weight_in_file(file, tensor.name, rows)
    return found


def weight_in_file(file: GgufFile, name: str, rows: np.ndarray | None = None) -> QuantisedWeight:
    """A tensor of the file, left there. A mixture's experts [E, outputs, inputs] become one matrix,
    one expert below another. rows: as in QuantisedWeight.
    """
    tensor = file.tensors[name]
    outputs, inputs = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    in_order = rows is None or bool((np.diff(rows) == 1).all())
    return QuantisedWeight(
        name,
        tensor.kind,
        (outputs, inputs),
        file.source,
        tensor.begin,
        None if in_order else rows,
    )


def _row_order(undo: TensorProcessor, tensor: FileTensor) -> np.ndarray | None:
    """Which row of the file each row of the parameter is, int64 [rows] (llama.cpp permutes queries
    and keys for its rotary embedding); None: transformers does more to this tensor than that.
    """
    count = tensor.shape[0]
    numbers = np.arange(1.0, count + 1)
    made = undo.process(np.stack([numbers, -numbers], axis=1), tensor.name).weights
    if made.shape != (count, 2) or not np.array_equal(made[:, 0], -made[:, 1]):
        return None
    if not np.array_equal(np.sort(made[:, 0]), numbers):
        return None
    order: np.ndarray = made[:, 0].astype(np.int64) - 1
    return order


def not_run(file: GgufFile, tensor: FileTensor) -> str:
    expand = "--weights bf16 (weights='bf16' in Python) expands it"
    other = "use another quantisation of the model"
    return (
        f"{file.path}: tensor {tensor.name} is quantised as {tensor.kind.name}, which the kernel "
        f"does not run; accepted: {', '.join((*BLOCKS, *FLOATS))}; "
        f"{expand if can_dequantise(tensor.kind) else other}"
    )


def _check_room(file: GgufFile, dtype: torch.dtype | None, experts: bool) -> None:
    """UserError for a model that is larger than the free memory. Arguments as of load_weights."""
    needed = sum(
        one.end - one.begin if dtype is None else math.prod(one.shape) * dtype.itemsize
        for one in file.tensors.values()
        if experts or "_exps." not in one.name
    )
    free = free_memory()
    if free is not None and needed > free:
        raise UserError(
            f"{file.path} does not fit into memory: its weights take {needed / 1e9:.1f} GB"
            f"{'' if dtype is None else ' when expanded'}, but only {free / 1e9:.1f} GB are free"
        )


def _check_shape(
    file: GgufFile,
    found: tuple[int, ...],
    wanted: tuple[int, ...],
    tensors: tuple[str, ...],
    name: str,
) -> None:
    if found != wanted:
        raise UserError(
            f"{file.path}: {' and '.join(tensors)} form a tensor of shape {found}, but the "
            f"model's {name} is {wanted}"
        )


def _sources(
    file: GgufFile, model: nn.Module, config: PretrainedConfig
) -> dict[str, tuple[str, ...]]:
    """The tensors of the file that each parameter of the model is made of."""
    architecture = next(
        number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture
    )
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    found: dict[str, tuple[str, ...]] = {}
    for name, _ in model.named_parameters():
        wanted = _expert_tensors(name) or (_tensor(names.get_name, name),)
        missing = [tensor for tensor in wanted if tensor not in file.tensors]
        if missing:
            raise UserError(
                f"{file.path} has no tensor {missing[0]}, which the model's {name} needs"
            )
        found[name] = wanted
    used = {tensor for wanted in found.values() for tensor in wanted} | set(ROPE_FACTORS)
    left = [name for name in file.tensors if name not in used]
    if left:
        raise UserError(
            f"{file.path}: the model has no place for tensor {left[0]} ({len(left)} such "
            f"tensors); this kind of {file.architecture} is not supported"
        )
    return found


def _tensor(find: Callable[[str], str | None], name: str) -> str:
    stem, _, leaf = name.rpartition(".")
    return f"{find(stem) or stem}.{leaf}"


def _expert_tensors(name: str) -> tuple[str, ...]:
    parts = name.split(".")
    if parts[-2] != "experts" or parts[-1] not in EXPERTS:
        return ()
    return tuple(f"blk.{parts[2]}.{tensor}" for tensor in EXPERTS[parts[-1]])


def _checked(file: GgufFile, name: str, values: np.ndarray) -> np.ndarray:
    # one sum instead of a look at every value: anything infinite makes it so, too
    if not np.isfinite(values.sum(dtype=np.float64)):
        raise UserError(
            f"{file.path} is damaged: tensor {name} holds values that are not finite; download "
            "it again"
        )
    return values
