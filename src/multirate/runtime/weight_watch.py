"""Notices that a model was changed after something was made of its weights."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multirate.runtime.hf.foreign_code import (
    FUNCTIONS,
    HOOKS,
    LOOP,
    MASKS,
    TORCH_FUNCTIONS,
    foreign,
    global_hooks,
)
from multirate.runtime.hf.parts import attention_function, mask_function

SAMPLES = 256  # values of a matrix that are compared one by one, at least
GOLDEN = 0.618
_WORD = 8  # bytes that are added at once
_SIZED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
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
    on or taken off (of a module, its class, or all modules), another attention function, methods
    of `generate` that were overridden, and numbers that transformers' and torch's modules and the
    configuration compute with. In-place writes through `.data` are not counted by torch. For them
    the bits of every row are added up, and a value or more of each row is compared by itself: a
    change of one value is always noticed, and so are rows or columns that were exchanged. Only
    of tensors of three dimensions (a mixture's stacked experts, most of which no token reads) the
    values alone are compared. A check reads the weights once, at the memory's full speed: less
    than a decoded token takes.
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
        self._hooks = [module[name] for module in modules for name in HOOKS]
        self._buffers = [module["_buffers"] for module in modules if module["_buffers"]]
        held = chain(self._model.parameters(), self._model.buffers())
        self._held = list({id(tensor): tensor for tensor in held}.values())
        self._samples: list[np.ndarray] = []
        self._rows: list[Tensor] = []
        self._counted: list[Tensor] = []
        for tensor in self._held:
            samples = list(_sample(tensor))
            self._samples += samples
            self._rows += _rows(tensor)
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
            [module.get("forward") for module in self._modules],
            list(map(Tensor.data_ptr, self._held)),
            list(map(writes, self._counted)),
            list(map(id, chain.from_iterable(map(dict.values, self._buffers)))),
            b"".join([sample.copy().data for sample in self._samples]),
            _sums(self._rows),
            [module.get(name) for module, name in self._numbers],
            list(map(type, self._kept[: len(self._modules)])),
            [(cls.__call__, getattr(cls, "forward", None)) for cls in self._classes],
            [home.get(name) for home in self._homes for name in (*FUNCTIONS, *MASKS)],
            list(map(id, global_hooks())),
            [getattr(F, name) for name in TORCH_FUNCTIONS],
            [getattr(self._model, name, None) for name in LOOP],
            attention_function(getattr(self._model, "config", None)),
            mask_function(getattr(self._model, "config", None)),
            _settings(getattr(self._model, "config", None)),
            [[str(module.get(name)) for name in _SWITCHES] for module in self._switched],
        )


def writes(tensor: Tensor) -> int:
    """How often a tensor was written to in place, as far as torch counts: not where it was made in
    inference mode.
    """
    return -1 if tensor.is_inference() else tensor._version


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


def _settings(config: Any) -> dict[str, Any]:
    """The numbers of a configuration that modules may compute with."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return (
        {
            name: value
            for name, value in vars(text).items()
            if type(value) in (int, float) and not name.endswith("_token_id")
        }
        if text is not None
        else {}
    )


def _in_memory_order(tensor: Tensor) -> Tensor | None:
    """Its bits as whole numbers in the order of its memory; None: they cannot be read so."""
    if (
        type(tensor) not in (nn.Parameter, Tensor)
        or tensor.device.type == "meta"
        or tensor.layout != torch.strided
        or not tensor.numel()
        or tensor.element_size() not in _SIZED
    ):
        return None
    tensor = tensor.detach()
    if tensor.ndim == 2 and not tensor.is_contiguous():
        tensor = tensor.t()
    return tensor.view(_SIZED[tensor.element_size()]) if tensor.is_contiguous() else None


def _sample(tensor: Tensor) -> Iterator[np.ndarray]:
    """Values to compare, as a view of the tensor's memory: all of a vector; of a matrix a value or
    more of each row, and SAMPLES at least, spread over rows and columns.
    """
    bits = _in_memory_order(tensor)
    if bits is None or bits.device.type != "cpu":
        return
    flat = bits.view(-1).numpy()
    yield flat if bits.ndim < 2 else flat[:: _step(len(flat), bits.shape[-1])]


def _rows(tensor: Tensor) -> Iterator[Tensor]:
    """A matrix's rows as words that can be added up, as a view of its memory."""
    bits = _in_memory_order(tensor)
    if bits is None or bits.ndim != 2:
        return
    whole = bits.shape[1] * bits.element_size() % _WORD == 0
    aligned = bits.storage_offset() * bits.element_size() % _WORD == 0
    yield bits.view(torch.int64) if whole and aligned else bits


def _sums(rows: list[Tensor]) -> list[bytes]:
    """The sum of each row, for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for one in rows:
        by_device.setdefault(one.device, []).append(one.sum(1, dtype=torch.int64))
    return [torch.cat(sums).cpu().numpy().tobytes() for sums in by_device.values()]


@functools.lru_cache(maxsize=256)
def _step(size: int, columns: int) -> int:
    """The distance between the values compared of a matrix with so many values in all: one of each
    row at least. From row to row they move on by about the golden ratio, which spreads them over
    rows and columns alike.
    """
    widest = max(1, min(size // SAMPLES, columns))
    narrowest = widest * 3 // 4 + 1

    def uneven(step: int) -> float:
        return abs(max(step, columns) / min(step, columns) % 1 - GOLDEN)

    steps = [s for s in range(narrowest, widest + 1) if math.gcd(s, columns) == 1]
    return min(steps, key=uneven, default=widest)
