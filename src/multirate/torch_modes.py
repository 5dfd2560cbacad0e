"""The modes and defaults of torch that a thread computes in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Modes:
    """What a thread may have switched on around its calls. autocast: the dtypes by device type."""

    inference: bool = False
    gradients: bool = False
    autocast: tuple[torch.dtype | None, ...] = (None,) * len(_AUTOCAST_DEVICES)

    @staticmethod
    def now() -> Modes:
        """Those of the calling thread."""
        return Modes(
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            tuple(
                torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
                for device in _AUTOCAST_DEVICES
            ),
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        """The calling thread has these for the duration."""
        with ExitStack() as stack:
            for device, dtype, now in zip(
                _AUTOCAST_DEVICES, self.autocast, Modes.now().autocast, strict=True
            ):
                if dtype != now:
                    stack.enter_context(
                        torch.autocast(device, dtype=dtype, enabled=dtype is not None)
                    )
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            yield

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, called with these."""

        def called(*arguments: Any) -> Any:
            with self.active():
                return function(*arguments)

        return called


@contextmanager
def own_modes(gradients: bool = False) -> Iterator[None]:
    """Leaves the caller's modes: tensors made in inference mode could not be written to by a later
    call, and autocast would compute in another dtype than the model's.
    """
    with Modes(gradients=gradients).active():
        yield


@contextmanager
def plain_tensors() -> Iterator[None]:
    """For libraries that make tensors on torch's default device, which the caller may have set."""
    with own_modes(), torch.device("cpu"):
        yield


class Defaults(TorchFunctionMode):
    """What torch.set_default_dtype does, for this thread alone. empty_on_meta: torch.empty takes no
    memory; modules make their large parameters with it and their buffers without it.
    """

    def __init__(self, dtype: torch.dtype, empty_on_meta: bool = False) -> None:
        super().__init__()
        self._dtype, self._empty_on_meta = dtype, empty_on_meta

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FLOATING and kwargs.get("dtype") is None:
            kwargs["dtype"] = self._dtype
        if func is torch.tensor and isinstance(args[0] if args else kwargs.get("data"), float):
            kwargs["dtype"] = kwargs.get("dtype") or self._dtype
        if self._empty_on_meta and func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


_FLOATING = frozenset(
    {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.linspace, torch.eye}
)
"""Make numbers of the default dtype where none is given."""


@contextmanager
def building(
    dtype: torch.dtype, device: torch.device | str = "cpu", empty_on_meta: bool = False
) -> Iterator[None]:
    """Modules made here have parameters and buffers of this dtype on this device, whatever the
    process's defaults and the caller's modes are. (Accelerate's and transformers' own ways change
    settings that all threads see.)
    """
    with own_modes(gradients=True), torch.device(device), Defaults(dtype, empty_on_meta):
        yield
