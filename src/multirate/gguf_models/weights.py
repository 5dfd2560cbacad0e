"""A GGUF file's tensors as the parameters of a transformers model."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gguf
import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from multirate.errors import UserError
from multirate.gguf_models.config import ROPE_FACTORS, refusing
from multirate.gguf_models.file import GgufFile
from multirate.model.hf.empty import empty_model

_EXPERTS = {
    "gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "down_proj": ("ffn_down_exps.weight",),
}
"""Parameters that hold all experts of a layer → the tensors they are made of, one below another."""


def load_weights(file: GgufFile, config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """The causal LM of `config` with the file's weights as `dtype`, in evaluation mode.

    Raises UserError for a tensor that is missing, has another shape, is quantised in a way that is
    not known, holds infinite values, or that the model has no place for.
    """
    with refusing(file):
        model: Any = empty_model(config, dtype)
    model.tie_weights()  # what is tied is one parameter from here on
    sources = _sources(file, model, config)
    undo = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=config.to_dict())

    def parameter(name: str) -> nn.Parameter:
        with refusing(file):
            parts = [
                _checked(file, source, undo.process(file.values(source), source).weights)
                for source in sources[name]
            ]
            whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        # the file's own memory cannot be written to, and is gone when the file is
        tensor = torch.from_numpy(whole if whole.flags.writeable else whole.copy()).to(dtype)
        if tensor.shape != shapes[name]:
            raise UserError(
                f"{file.path}: {' and '.join(sources[name])} form a tensor of shape "
                f"{tuple(tensor.shape)}, but the model's {name} is {tuple(shapes[name])}"
            )
        return nn.Parameter(tensor.contiguous(), requires_grad=False)

    shapes = {name: value.shape for name, value in model.named_parameters()}
    modules = dict(model.named_modules())
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as workers:
        for name, value in zip(sources, workers.map(parameter, sources), strict=True):
            path, _, leaf = name.rpartition(".")
            setattr(modules[path], leaf, value)
    model.tie_weights()
    return model.eval()


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
    if parts[-2] != "experts" or parts[-1] not in _EXPERTS:
        return ()
    return tuple(f"blk.{parts[2]}.{tensor}" for tensor in _EXPERTS[parts[-1]])


def _checked(file: GgufFile, name: str, values: np.ndarray) -> np.ndarray:
    # one sum instead of a look at every value: anything infinite makes it so, too
    if not np.isfinite(values.sum(dtype=np.float64)):
        raise UserError(
            f"{file.path} is damaged: tensor {name} holds values that are not finite; download "
            "it again"
        )
    return values
