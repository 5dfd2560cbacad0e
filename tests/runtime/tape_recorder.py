"""A recorder with the semantics of a CUDA graph, on any device: it repeats tensor operations, never
Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

# What asks the device for a value, and so ends a capture on CUDA.
_READS = {
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "masked_select",
    "unique",
    "_unique2",
    "equal",
}


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        bools = (
            any(isinstance(t, Tensor) and t.dtype == torch.bool for t in args[1])
            if name == "index"
            else False
        )
        if name in _READS or bools:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        out = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, out))
        return out


class EagerRecorder:
    """Runs the function itself each time: the static-shape code without graphs."""

    def capture(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return function


class TapeRecorder:
    """capture() notes every tensor operation of one run; a replay does them again on the tensors of
    that run.

    Numbers that Python read during the capture stay what they were, as in a CUDA graph; reading the
    device raises.
    """

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def capture(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.captured += 1
        with _Tape() as tape:
            result = function()

        def replay() -> Tensor:
            self.replayed += 1
            made: dict[int, Tensor] = {}

            def now(tensor: Tensor) -> Tensor:
                return made.get(id(tensor), tensor)

            def note(old: Any, new: Any) -> None:
                if isinstance(old, Tensor):
                    made[id(old)] = new
                elif isinstance(old, (tuple, list)):
                    for a, b in zip(old, new, strict=True):
                        note(a, b)

            for func, args, kwargs, out in tape.steps:
                note(
                    out,
                    func(*tree_map_only(Tensor, now, args), **tree_map_only(Tensor, now, kwargs)),
                )
            return now(result)

        return replay
