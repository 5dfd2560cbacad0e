"""What of a model's state at the time of a call keeps us from decoding it as its own loop would."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from multirate.integration.settings import Unsupported
from multirate.runtime.hf.foreign_code import called, hooked

_RANDOM = ("drop", "jitter")
"""In the names of numbers by which transformers' modules are random while they train."""


def check_model(model: nn.Module) -> None:
    """Raises Unsupported for hooks and torch's modes, which may count calls, look at places or
    record what they see, and for dropout that is in use.
    """
    if (hook := hooked(model)) is not None:
        raise Unsupported(hook)
    for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
        if not isinstance(mode, DeviceContext):
            raise Unsupported(
                f"a torch mode that intercepts every operation ({called(type(mode))})"
            )
    for name, module in model.named_modules():
        if module.training and (what := _random(module)) is not None:
            raise Unsupported(
                f"{what} of {name or 'the model'}, which is in training mode (model.eval()),"
            )


def _random(module: nn.Module) -> str | None:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return "dropout" if module.p > 0 else None
    for name, value in vars(module).items():
        if isinstance(value, float) and value > 0 and any(part in name for part in _RANDOM):
            return name
    return None


class RandomState:
    """The state of torch's generators, to be restored where the model's own loop runs after all."""

    def __init__(self, model: Any) -> None:
        device = getattr(model, "device", None)
        self._device = device if getattr(device, "type", "") == "cuda" else None
        self._states = self._read()

    def _read(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        device = self._device
        return torch.get_rng_state(), None if device is None else torch.cuda.get_rng_state(device)

    def restore(self) -> None:
        state, on_device = self._states
        torch.set_rng_state(state)
        if on_device is not None and self._device is not None:
            torch.cuda.set_rng_state(on_device, self._device)
