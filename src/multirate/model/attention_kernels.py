"""Which of torch's attention kernels run on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kernels_of_any_shape() -> Iterator[None]:
    """For the duration, scaled_dot_product_attention takes no kernel that is planned for one shape.

    On Hopper torch prefers cuDNN's, and cuDNN plans each new shape for some hundreds of
    milliseconds. Prompts, batches of training text and growing caches nearly always have new ones.
    """
    planned = torch.backends.cuda.cudnn_sdp_enabled()
    if not planned or not torch.cuda.is_available():
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
