"""Keeps the memory of a long run level on a CPU.

Batches have many shapes, and for each shape of a bfloat16 product oneDNN compiles code of most of a
megabyte. It keeps the last 1,024 of them, PyTorch's binding to it another 1,024, and glibc does not
return the holes that replaced ones
leave behind: a run on a model of 135M parameters grew by 0.1 GB a minute. So both caches are made
smaller (a step on such a model needs about sixty, and the next step has other shapes), and freed
memory is returned now and then.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

CACHED_PRODUCTS = 256
RELEASE_EVERY = 16
"""Steps."""


def bound_product_caches() -> None:
    """Both libraries read their variable at their first product: call this before. A user's own
    value stays.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(CACHED_PRODUCTS))


def memory_releaser() -> Callable[[], None]:
    """What returns freed memory to the system: glibc's malloc_trim; elsewhere nothing is needed or
    known.
    """
    if sys.platform != "linux":
        return lambda: None
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library
        return lambda: None
    return lambda: trim(0)
