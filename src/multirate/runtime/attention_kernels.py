"""Which of torch's attention kernels run on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_counting = threading.Lock()
_inside = 0
_planned = False


@contextmanager
def kernels_of_any_shape() -> Iterator[None]:
    """For the duration, scaled_dot_product_attention takes no kernel that is planned for one shape.

    On Hopper torch prefers cuDNN's, and cuDNN plans each new shape for some hundreds of
    milliseconds. Prompts, batches of training text and growing caches nearly always have new ones.

    Torch has this setting for the whole process only: with several threads inside, the last one to
    leave restores it.
    """
    global _inside, _planned
    if not torch.cuda.is_available():
        yield
        return
    with _counting:
        _inside += 1
        if _inside == 1:
            _planned = torch.backends.cuda.cudnn_sdp_enabled()
            torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        with _counting:
            _inside -= 1
            if not _inside:
                torch.backends.cuda.enable_cudnn_sdp(_planned)
