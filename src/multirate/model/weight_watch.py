"""Notices that a model was changed after something was made of its weights."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from multirate.model.hf.parts import attention_function

FUNCTIONS = ("apply_rotary_pos_emb", "rotate_half", "repeat_kv", "eager_attention_forward")
"""What the modules of transformers' families call by name in the file they are written in."""
SAMPLES = 256  # values of a matrix that are compared
GOLDEN = 0.618
_SIZED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HARMLESS_HOOKS = ("multirate.", "transformers.utils.output_capturing")
"""Hooks of ours, and those with which transformers records hidden states on demand: both leave
outputs as they are.
"""
_NO_SETTINGS = {"training", "max_seq_len_cached", "gradient_checkpointing", "_is_hf_initialized"}
_SWITCHES = (
    "_active_adapter",
    "_disable_adapters",
    "scaling",
    "merged_adapters",
)  # of PEFT's layers


class WeightWatch:
    """Remembers the parameters, modules and hooks of `model`; `changed` says whether they are still
    those.

    It notices replaced, moved and cast parameters and buffers, in-place writes that torch counts
    (optimizer steps, copy_, load_state_dict), modules exchanged or wrapped, hooks and forwards put
    on or taken off (of a module, its class, or all modules), another attention function, and
    numbers that transformers' and torch's modules compute with. In-place writes through `.data`
    are not counted by torch: they are noticed where they reach the values that are compared, all
    of a vector's and a lattice of a matrix's. Writes to 2% of its rows or columns side by side or
    more always do, smaller ones may not. A check of a model with 30 layers takes about 1 ms.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.renew()

    def renew(self) -> None:
        """From now on, `changed` compares with what the model is now."""
        self._kept: list[Any] = list(self._model.modules())  # alive, or others could have their ids
        modules = [vars(module) for module in self._kept]
        self._modules = modules
        self._children = [module["_modules"] for module in modules if module["_modules"]]
        self._tensors = [module["_parameters"] for module in modules if module["_parameters"]]
        self._hooks = [
            module[name] for module in modules for name in ("_forward_hooks", "_forward_pre_hooks")
        ]
        self._buffers = [module["_buffers"] for module in modules if module["_buffers"]]
        held = chain(self._model.parameters(), self._model.buffers())
        self._held = list({id(tensor): tensor for tensor in held}.values())
        self._samples, self._counted = [], []
        for tensor in self._held:
            samples = list(_sample(tensor))
            self._samples += samples
            # of what is compared as a whole, writes need not be counted: some rotary embeddings
            # write their frequencies anew in every forward
            whole = samples and tensor.ndim < 2
            if not whole:
                self._counted.append(tensor)
        self._numbers = [(vars(m), name) for m in self._kept for name in _numbers(m)]
        self._classes = list({type(module): None for module in self._kept})
        homes = {cls.__module__ for cls in self._classes}
        self._homes = [vars(sys.modules[home]) for home in sorted(homes) if home in sys.modules]
        self._switched = [module for module in modules if "_active_adapter" in module]
        self._kept += [hook for hooks in self._hooks for hook in hooks.values()]
        self._seen = self._state()

    def changed(self) -> bool:
        """Whether the model is another one than at the last `renew`."""
        return self._state() != self._seen

    def _state(self) -> tuple[Any, ...]:
        return (
            list(map(id, chain.from_iterable(map(dict.values, self._children)))),
            list(map(id, chain.from_iterable(map(dict.values, self._tensors)))),
            [id(hook) for hooks in self._hooks for hook in foreign(hooks)]
            if any(self._hooks)
            else [],
            ["forward" in module for module in self._modules],
            list(map(Tensor.data_ptr, self._held)),
            list(map(writes, self._counted)),
            list(map(id, chain.from_iterable(map(dict.values, self._buffers)))),
            b"".join([sample.copy().data for sample in self._samples]),
            [module.get(name) for module, name in self._numbers],
            list(map(type, self._kept[: len(self._modules)])),
            [(cls.__call__, getattr(cls, "forward", None)) for cls in self._classes],
            [home.get(name) for home in self._homes for name in FUNCTIONS],
            list(map(id, global_hooks())),
            attention_function(getattr(self._model, "config", None)),
            [[str(module.get(name)) for name in _SWITCHES] for module in self._switched],
        )


def writes(tensor: Tensor) -> int:
    """How often a tensor was written to in place, as far as torch counts: not where it was made in
    inference mode.
    """
    return -1 if tensor.is_inference() else tensor._version


def foreign(hooks: Mapping[int, Any]) -> list[Any]:
    """Of a module's hooks, those that may change what it computes."""
    return [
        h
        for h in hooks.values()
        if not str(getattr(h, "__module__", None) or "").startswith(_HARMLESS_HOOKS)
    ]


def global_hooks() -> list[Any]:
    """Hooks that torch calls for every module of the process."""
    return [
        *torch_module._global_forward_hooks.values(),
        *torch_module._global_forward_pre_hooks.values(),
    ]


def _numbers(module: nn.Module) -> list[str]:
    """The attributes of a module that are numbers it may compute with. Modules of others may count
    in theirs what they like.
    """
    if not type(module).__module__.startswith(("torch.", "transformers.")):
        return []
    if type(module) is nn.Linear:
        return []  # its sizes are its weight's
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, (int, float)) and name not in _NO_SETTINGS
    ]


def _sample(tensor: Tensor) -> Iterator[np.ndarray]:
    """Values to compare, as a view of the tensor's memory: all of a vector, SAMPLES or some
    more of a matrix, spread over its rows and columns.
    """
    if (
        type(tensor) not in (nn.Parameter, Tensor)
        or tensor.device.type != "cpu"
        or tensor.layout != torch.strided
        or not tensor.is_contiguous()
        or not tensor.numel()
        or tensor.element_size() not in _SIZED
    ):
        return
    flat = tensor.detach().view(-1)
    flat = flat.view(_SIZED[tensor.element_size()])
    if tensor.ndim < 2:
        yield flat.numpy()
        return
    yield flat.numpy()[:: _step(flat.numel(), tensor.shape[-1])]


@functools.lru_cache(maxsize=256)
def _step(size: int, columns: int) -> int:
    """The distance between the SAMPLES values compared of a matrix with so many values in all.
    From row to row they move on by about the golden ratio, which spreads them over rows and
    columns alike.
    """
    widest = max(1, size // SAMPLES)
    narrowest = widest * 3 // 4 + 1

    def uneven(step: int) -> float:
        return abs(max(step, columns) / min(step, columns) % 1 - GOLDEN)

    steps = [s for s in range(narrowest, widest + 1) if math.gcd(s, columns) == 1]
    return min(steps, key=uneven, default=widest)
