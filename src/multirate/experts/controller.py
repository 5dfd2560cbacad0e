"""Predictions that are chosen, and switched off, by what they gain: that is measured, not
believed.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from multirate.experts.loader import Prediction
from multirate.experts.predictors import Predictor

_OFF = -1


class AdaptivePredictor(Predictor):
    """Predicts what one of several predictors does, and only while that makes passes faster.

    Single-token passes are timed in blocks, with each predictor and without any in turn. How much a
    text misses changes with what it says, so only blocks of the same turn are compared: a predictor
    is judged by the median, over `turns`, of its block's seconds over those without any; after half
    of them one that is a tenth slower is left out. Then the fastest stays for `stay` passes if it
    gains the share `margin` at least, which noise alone seldom does, else none does; and all are
    tried again. A pass is timed from its first row to the next one's; longer passes (prompts) and
    the first after a change are left out.
    """

    def __init__(
        self,
        inner: Mapping[str, Predictor],
        *,
        block: int = 8,
        turns: int = 9,
        stay: int = 2000,
        margin: float = 0.03,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._names, self._inner = list(inner), list(inner.values())
        self._block, self._lock, self._stay, self._clock = block, turns, stay, clock
        self._margin = margin
        self._tried = [*range(len(self._inner)), _OFF]
        self._times: list[dict[int, float]] = [
            {}
        ]  # of each turn: mean seconds of a pass, by candidate
        self.candidate, self.on = 0, True
        self._began: float | None = None
        self._single, self._left, self._said = True, 0, False
        self._seconds: list[float] = []

    @property
    def candidates(self) -> Sequence[Predictor]:
        return self._inner

    @property
    def depth(self) -> int:
        """Of the one that names now."""
        return self._inner[self.candidate].depth

    @depth.setter
    def depth(self, depth: int) -> None:
        self._inner[self.candidate].depth = depth

    @property
    def most_depth(self) -> int:  # type: ignore[override]
        return self._inner[self.candidate].most_depth

    @property
    def verdict(self) -> str:
        """What was measured last, in a sentence."""
        gains = self._ratios()
        if not gains:
            return "prefetching has not been measured yet"
        best, pays = self._best(gains)
        word, name = "is faster" if pays else "is not faster", self._names[best]
        return (
            f"prefetching ({name}) {word} here: a token takes {gains[best]:.2f} times as long as "
            "without it"
        )

    def _best(self, ratios: Mapping[int, float]) -> tuple[int, bool]:
        """The fastest predictor, and whether it gains enough."""
        best = min(ratios, key=ratios.__getitem__)
        return best, ratios[best] <= 1 - self._margin

    def _ratios(self) -> dict[int, float]:
        """A pass's time with each predictor over that without any, by candidate; of those that have
        been measured.
        """
        found: dict[int, float] = {}
        for candidate in range(len(self._inner)):
            pairs = [
                turn[candidate] / turn[_OFF]
                for turn in self._times
                if candidate in turn and _OFF in turn
            ]
            if pairs:
                found[candidate] = statistics.median(pairs)
        return found

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
        if not self.on:
            return []
        chosen = self._inner[self.candidate]
        if not chosen.can_run:  # transformers' own layers run this pass
            runnable = next((i for i, one in enumerate(self._inner) if one.can_run), None)
            self._say(
                self._names[self.candidate], None if runnable is None else self._names[runnable]
            )
            if runnable is None:
                return []
            chosen = self._inner[runnable]
        return chosen.predict(row, residual)

    def _say(self, name: str, other: str | None) -> None:
        if not self._said:
            self._said = True
            warnings.warn(
                f"expert policy aot: {name} runs only on the native kernel "
                "(custom_generate=multirate.custom_generate()); this pass uses "
                f"{other or 'nothing'} to predict experts",
                stacklevel=2,
            )

    def _count(self, seconds: float) -> None:
        if self._left:  # a decision stands
            self._left -= 1
            if not self._left:
                self._tried, self._times = [*range(len(self._inner)), _OFF], [{}]
            return
        self._seconds.append(seconds)
        if len(self._seconds) <= self._block:
            return
        # the first pass of a block still has what the last block left in the cache
        self._times[-1][self.candidate if self.on else _OFF] = statistics.fmean(self._seconds[1:])
        self._seconds = []
        waiting = [candidate for candidate in self._tried if candidate not in self._times[-1]]
        if waiting:
            self._use(waiting[0])
        elif len(self._times) < self._lock:
            self._next_turn()
        else:
            self._decide()

    def _next_turn(self) -> None:
        if 2 * len(self._times) >= self._lock:
            slow = {candidate for candidate, ratio in self._ratios().items() if ratio > 1.1}
            self._tried = [candidate for candidate in self._tried if candidate not in slow]
        if self._tried == [_OFF]:
            self._decide()
            return
        self._tried = [*self._tried[1:], self._tried[0]]  # whose block comes first changes
        self._times.append({})
        self._use(self._tried[0])

    def _decide(self) -> None:
        best, pays = self._best(self._ratios())
        self._use(best if pays else _OFF)
        self._left = self._stay

    def _use(self, candidate: int) -> None:
        self.on = candidate != _OFF
        if self.on:
            self.candidate = candidate
