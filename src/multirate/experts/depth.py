"""How far ahead to predict experts: the least depth whose compute covers what is to be read, if
predicting them is cheap.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from multirate.experts.predictors import Predictor
from multirate.experts.stats import ExpertStats


def depth_that_covers(compute: float, read: float, most: int) -> int:
    """compute: seconds of a layer without waiting; read: seconds of reading what a layer lacks → 1
    … most.

    Where a layer's reads take longer than its compute on average, no depth hides them all; a deeper
    one then keeps the disk busy through the layers that lack little.
    """
    if compute <= 0:
        return 1
    return max(1, min(most, math.ceil(read / compute)))


def depth_that_pays(predicting: float, layer: float, most: int) -> int:
    """predicting: seconds of predicting one row ahead; layer: seconds of a layer, waiting included
    → the most rows that a fifth of a layer's time pays for, 1 … most.
    """
    if predicting <= 0:
        return most
    return max(1, min(most, int(0.2 * layer / predicting)))


class MeasuredDepth:
    """Sets a predictor's depth from the passes of the last `window` tokens."""

    def __init__(
        self,
        predictor: Predictor,
        rows: int,
        window: int = 24,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._predictor, self._rows, self._window, self._clock = predictor, rows, window, clock
        self._passes, self._candidate = 0, predictor.candidate
        self._since: tuple[float, ExpertStats] | None = None

    def new_pass(self, stats: Callable[[], ExpertStats], rows: int) -> None:
        """A pass over the layers begins; stats: the counts until now; rows: how many tokens it is
        for (a prompt's passes are left out).
        """
        if (
            not self._predictor.on or self._predictor.candidate != self._candidate
        ):  # no predictor is on, or another
            self._candidate, self._since = self._predictor.candidate, None
        if not self._predictor.on:
            return
        self._passes += 1
        if rows == 1 and self._since is not None and self._passes < self._window:
            return
        now, counts = self._clock(), stats().copy()
        if (
            rows > 1 or self._since is None or counts.uses < self._since[1].uses
        ):  # a prompt, or counts were reset
            self._since, self._passes = (now, counts), 0
            return
        began, before = self._since
        spent = counts.minus(before)
        layers = self._passes * self._rows
        whole, predicting = (now - began) / layers, spent.predictor_seconds / layers
        compute = whole - spent.stall_seconds / layers
        paid = depth_that_pays(
            predicting / self._predictor.depth, whole, self._predictor.most_depth
        )
        self._predictor.depth = depth_that_covers(compute, spent.read_seconds / layers, paid)
        self._since, self._passes = (now, counts), 0
