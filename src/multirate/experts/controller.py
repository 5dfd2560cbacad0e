"""Predictions that are switched off where they do not pay: what reading ahead gains is measured, not believed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from multirate.experts.loader import Prediction
from multirate.experts.predictors import Predictor


class SelfDisabling(Predictor):
    """Passes a predictor's names on only while that makes passes faster.

    Single-token passes are timed in blocks, with and without predictions in turn, until each way has `blocks` of them;
    then predictions stay on for `trust` passes if their median is lower by the share `margin`, which noise alone seldom
    is, or off; and both are tried again. A pass is timed from its
    first row to the next one's; longer passes (prompts) and the first after a change do not count.
    """

    def __init__(
        self, inner: Predictor, *, block: int = 12, blocks: int = 2, trust: int = 400, margin: float = 0.03,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.inner, self.on = inner, True
        self.most_depth = inner.most_depth
        self._block, self._needed, self._trust, self._clock = block, block * blocks, trust, clock
        self._margin = margin
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._began: float | None = None
        self._single, self._in_block, self._left = True, 0, 0

    @property
    def verdict(self) -> str:
        """What was measured last, in a sentence."""
        on, off = (statistics.median(self._times[way]) if self._times[way] else None for way in (True, False))
        if on is None or off is None:
            return "reading ahead has not been measured yet"
        word = "pays" if self._pays(on, off) else "does not pay"
        return f"reading ahead {word} here: {1e3 * on:.2f} ms a token with it, {1e3 * off:.2f} without"

    def _pays(self, on: float, off: float) -> bool:
        return on <= (1 - self._margin) * off

    def began(self, rows: int) -> None:
        self.inner.began(rows)
        now = self._clock()
        if self._began is not None and self._single:
            self._count(now - self._began)
        self._began, self._single = now, rows == 1

    def used(self, row: int, experts: Sequence[int]) -> None:
        self.inner.used(row, experts)

    def routed(self, experts: Tensor, weights: Tensor) -> None:
        self.inner.routed(experts, weights)

    def predict(self, row: int, residual: Tensor) -> list[Prediction]:
        self.inner.depth = self.depth
        return self.inner.predict(row, residual) if self.on else []

    def _count(self, seconds: float) -> None:
        if self._left:  # a decision stands
            self._left -= 1
            if not self._left:
                self._times = {True: [], False: []}
                self._in_block = 0
            return
        self._in_block += 1
        if self._in_block > 1:  # the first pass of a block still has what the last block left in the cache
            self._times[self.on].append(seconds)
        if self._in_block <= self._block:
            return
        self._in_block = 0
        if all(len(times) >= self._needed for times in self._times.values()):
            on, off = (statistics.median(self._times[way]) for way in (True, False))
            self.on, self._left = self._pays(on, off), self._trust
        else:
            self.on = not self.on
