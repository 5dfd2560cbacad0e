"""Who names experts ahead of time. A predictor changes what is loaded early, never what is computed."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multirate.experts.loader import Prediction

SelectExperts = Callable[[Tensor], Tensor]
"""A layer's own norm, router and selection rule: the stream after attention [N, H] → experts [N, k]."""


class Predictor(ABC):
    """Names experts of later layers when the experts of layer `row` are asked for."""

    def used(self, row: int, experts: Sequence[int]) -> None:  # noqa: B027 - optional
        """Layer `row` needs these experts now: what there is to learn from."""

    @abstractmethod
    def predict(self, row: int, residual: Tensor) -> list[Prediction]:
        """residual [N, H]: the stream after the attention of layer `row`. → predictions for later rows of this pass."""


class PreviousToken(Predictor):
    """The experts that the layer `ahead` rows on had in the last pass."""

    def __init__(self, rows: int, ahead: int = 1) -> None:
        self._rows, self._ahead = rows, ahead
        self._last: list[list[int]] = [[] for _ in range(rows)]

    def used(self, row: int, experts: Sequence[int]) -> None:
        self._last[row] = list(experts)

    def predict(self, row: int, residual: Tensor) -> list[Prediction]:
        target = row + self._ahead
        if target >= self._rows:
            return []
        return [Prediction((target, expert), target, 1.0) for expert in self._last[target]]


class Popularity(Predictor):
    """The `count` experts that the layer `ahead` rows on has had most often so far."""

    def __init__(self, rows: int, count: int, ahead: int = 1) -> None:
        self._rows, self._count, self._ahead = rows, count, ahead
        self._uses: list[Counter[int]] = [Counter() for _ in range(rows)]

    def used(self, row: int, experts: Sequence[int]) -> None:
        self._uses[row].update(experts)

    def predict(self, row: int, residual: Tensor) -> list[Prediction]:
        target = row + self._ahead
        if target >= self._rows:
            return []
        best = self._uses[target].most_common(self._count)
        return [Prediction((target, expert), target, uses) for expert, uses in best]


class NextLayerGate(Predictor):
    """A later layer's own router on the current residual: the usual way, and the one to beat. select: of each row."""

    def __init__(self, select: Sequence[SelectExperts], ahead: int = 1) -> None:
        self._select, self._ahead = select, ahead

    @torch.no_grad()
    def predict(self, row: int, residual: Tensor) -> list[Prediction]:
        target = row + self._ahead
        if target >= len(self._select):
            return []
        chosen = torch.unique(self._select[target](residual)).tolist()
        return [Prediction((target, expert), target, 1.0) for expert in chosen]


class Oracle(Predictor):
    """What a recorded run of the same tokens needed: the bound of every predictor. trace: (row, experts) of each."""

    def __init__(self, trace: Sequence[tuple[int, Sequence[int]]], ahead: int = 1) -> None:
        self._trace, self._ahead, self._at = list(trace), ahead, -1

    def used(self, row: int, experts: Sequence[int]) -> None:
        self._at += 1

    def predict(self, row: int, residual: Tensor) -> list[Prediction]:
        found = []
        for step in range(1, self._ahead + 1):
            if self._at + step < len(self._trace):
                target, experts = self._trace[self._at + step]
                if target > row:  # the next pass begins with another token, which may never come
                    found += [Prediction((target, expert), target, 1.0) for expert in experts]
        return found


class Shuffled(Predictor):
    """Another predictor's rows with other experts: a control, as many reads and no knowledge."""

    def __init__(self, inner: Predictor, num_experts: int, seed: int = 0) -> None:
        self._inner, self._num, self._random = inner, num_experts, random.Random(seed)

    def used(self, row: int, experts: Sequence[int]) -> None:
        self._inner.used(row, experts)

    def predict(self, row: int, residual: Tensor) -> list[Prediction]:
        found = self._inner.predict(row, residual)
        others = self._random.sample(range(self._num), min(len(found), self._num))
        pairs = zip(found, others, strict=False)
        return [Prediction((one.key[0], expert), one.deadline, one.chance) for one, expert in pairs]
