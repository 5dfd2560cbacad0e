"""Predictions that are chosen, and switched off, by what they gain: that is measured, not believed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from multirate.experts.loader import Prediction
from multirate.experts.predictors import Predictor

_OFF = -1


class SelfDisabling(Predictor):
    """Passes on what one of several predictors names, only while that makes passes faster.

    Single-token passes are timed in blocks, with each predictor and without any in turn, until every way has `blocks`
    of them; then the fastest predictor stays for `trust` passes if its median is lower than without by the share
    `margin`, which noise alone seldom is, else none does; and all are tried again. A pass is timed from its first row
    to the next one's; longer passes (prompts) and the first after a change do not count.
    """

    def __init__(
        self, inner: Mapping[str, Predictor], *, block: int = 12, blocks: int = 2, trust: int = 400,
        margin: float = 0.03, clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._names, self._inner = list(inner), list(inner.values())
        self._block, self._needed, self._trust, self._clock = block, block * blocks, trust, clock
        self._margin = margin
        self._forget()
        self.way, self.on = 0, True
        self._began: float | None = None
        self._single, self._in_block, self._left = True, 0, 0

    @property
    def ways(self) -> Sequence[Predictor]:
        return self._inner

    @property
    def depth(self) -> int:
        """Of the one that names now."""
        return self._inner[self.way].depth

    @depth.setter
    def depth(self, depth: int) -> None:
        self._inner[self.way].depth = depth

    @property
    def most_depth(self) -> int:  # type: ignore[override]
        return self._inner[self.way].most_depth

    @property
    def verdict(self) -> str:
        """What was measured last, in a sentence."""
        if not all(self._times.values()):
            return "reading ahead has not been measured yet"
        best, on, off = self._measured()
        word, name = "pays" if self._pays(on, off) else "does not pay", self._names[best]
        return f"reading ahead ({name}) {word} here: {1e3 * on:.2f} ms a token with it, {1e3 * off:.2f} without"

    def _forget(self) -> None:
        self._times: dict[int, list[float]] = {way: [] for way in (*range(len(self._inner)), _OFF)}

    def _measured(self) -> tuple[int, float, float]:
        """The fastest predictor, its seconds a pass, and those without any."""
        medians = {way: statistics.median(times) for way, times in self._times.items()}
        best = min(range(len(self._inner)), key=medians.__getitem__)
        return best, medians[best], medians[_OFF]

    def _pays(self, on: float, off: float) -> bool:
        return on <= (1 - self._margin) * off

    def began(self, rows: int) -> None:
        for predictor in self._inner:
            predictor.began(rows)
        now = self._clock()
        if self._began is not None and self._single:
            self._count(now - self._began)
        self._began, self._single = now, rows == 1

    def used(self, row: int, experts: Sequence[int]) -> None:
        for predictor in self._inner:
            predictor.used(row, experts)

    def routed(self, experts: Tensor, weights: Tensor) -> None:
        for predictor in self._inner:
            predictor.routed(experts, weights)

    def predict(self, row: int, residual: Tensor) -> list[Prediction]:
        return self._inner[self.way].predict(row, residual) if self.on else []

    def _count(self, seconds: float) -> None:
        if self._left:  # a decision stands
            self._left -= 1
            if not self._left:
                self._forget()
                self._in_block = 0
            return
        self._in_block += 1
        now = self.way if self.on else _OFF
        if self._in_block > 1:  # the first pass of a block still has what the last block left in the cache
            self._times[now].append(seconds)
        if self._in_block <= self._block:
            return
        self._in_block = 0
        if all(len(times) >= self._needed for times in self._times.values()):
            best, on, off = self._measured()
            self.way, self.on, self._left = best, self._pays(on, off), self._trust
            return
        turn = list(self._times)
        following = turn[(turn.index(now) + 1) % len(turn)]
        self.on = following != _OFF
        if self.on:
            self.way = following
