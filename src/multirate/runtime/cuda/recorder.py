"""Captures of functions with static shapes, and what replays them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of one sequence are padded to one of these; a call with more (a long prompt) runs as
HFDecoder does.
"""
MAX_CAPTURES = 64
"""Captures kept for one cache; the least recently used goes first."""
_WARM_UPS = 3

Replay = Callable[[], Tensor]


def width_of(rows: int) -> int | None:
    """What so many rows of a sequence are padded to; None: they are too many."""
    return next((width for width in WIDTHS if width >= rows), None)


class Recorder(Protocol):
    """Turns a function without arguments, reading and writing fixed tensors, into one
    that repeats its device work.
    """

    def capture(self, function: Callable[[], Tensor]) -> Replay:
        """The returned function's tensor is valid until anything is captured or replayed again."""
        ...


class CudaRecorder:
    """One torch.cuda.CUDAGraph per function; all share a memory pool, for only one of them runs at
    a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()
        self._pool: Any = None

    def capture(self, function: Callable[[], Tensor]) -> Replay:
        if not self._graphs:  # a pool whose last graph is gone cannot be captured into any more
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self.device):
            # Libraries allocate workspaces and pick kernels at first use, which a capture may not
            # contain.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    function()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads of the user's program may go on using the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = function()
        self._graphs.add(graph)

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay
