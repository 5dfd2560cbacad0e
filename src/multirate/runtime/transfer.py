"""Numbers on their way to a GPU. From ordinary memory a copy waits until the device has done all
that it was given before; from pinned memory it is queued as any other work.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(numbers: NDArray[np.generic], device: torch.device) -> Tensor:
    """The numbers on `device`; on a CPU they may share memory."""
    return _pinned(numbers, device).to(device, non_blocking=True)


def copy_to(static: Tensor, numbers: NDArray[np.generic]) -> None:
    """static[...] = numbers, of the same shape."""
    static.copy_(_pinned(numbers, static.device), non_blocking=True)


def _pinned(numbers: NDArray[np.generic], device: torch.device) -> Tensor:
    # torch keeps pinned memory for later calls, not before what is queued has read it
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory() if device.type == "cuda" else tensor
