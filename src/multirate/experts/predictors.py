"""Predicts which experts will be needed. A predictor changes what is loaded early, never what is
computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multirate.experts.loader import Prediction

SelectExperts = Callable[[Tensor], Tensor]
"""A layer's own norm, router and selection rule: the stream after attention [N, H] → experts [N,
k], best first.
"""


class Predictor(ABC):
    """Predicts experts of later layers when the experts of layer `row` are asked for.

    depth: how many rows ahead are predicted, up to most_depth; the runtime may set it (depth.py).
    on: whether it predicts any.
    candidates: the predictors that it chooses from, and candidate: which of them it is now; most
    are just themselves.
    """

    depth = 1
    most_depth = 1
    on = True
    candidate = 0

    @property
    def candidates(self) -> Sequence[Predictor]:
        return [self]

    @property
    def can_run(self) -> bool:
        """Whether it can predict in the pass that runs now."""
        return True

    def began(self, rows: int) -> None:  # noqa: B027 - optional
        """A pass over the layers begins, with so many rows."""

    def used(self, row: int, experts: Sequence[int]) -> None:  # noqa: B027 - optional
        """Layer `row` needs these experts now: what there is to learn from."""

    def routed(self, experts: Tensor, weights: Tensor) -> None:  # noqa: B027 - optional
        """What the running layer's router chose, before `predict`: experts int64 [N, k], weights
        fp32 [N, k].
        """

    @abstractmethod
    def predict(self, row: int, residual: Tensor) -> list[Prediction]:
        """residual [N, H]: the stream after the attention of layer `row`. → predictions for later
        rows of this pass.
        """


_BY_RANK = [1 / (1 + rank) for rank in range(256)]


def likeliest(chosen: Tensor, target: int) -> list[Prediction]:
    """chosen [N, k], each row's likeliest first → the experts of row `target`: chance: Σ 1 / (1 +
    rank) over rows.
    """
    rows = chosen.tolist()
    if len(rows) == 1:
        return [
            Prediction((target, expert), target, _BY_RANK[rank])
            for rank, expert in enumerate(rows[0])
        ]
    chances: dict[int, float] = {}
    for experts in rows:
        for rank, expert in enumerate(experts):
            chances[expert] = chances.get(expert, 0.0) + 1 / (1 + rank)
    return [Prediction((target, expert), target, chance) for expert, chance in chances.items()]


class PreviousToken(Predictor):
    """The experts that the next layers had in the last pass."""

    def __init__(self, rows: int) -> None:
        self._last: list[list[int]] = [[] for _ in range(rows)]
        self.most_depth = rows - 1

    def used(self, row: int, experts: Sequence[int]) -> None:
        self._last[row] = list(experts)

    def predict(self, row: int, residual: Tensor) -> list[Prediction]:
        targets = range(row + 1, min(row + self.depth + 1, len(self._last)))
        return [
            Prediction((target, expert), target, 1.0)
            for target in targets
            for expert in self._last[target]
        ]


class Popularity(Predictor):
    """The `count` experts that each of the next layers has had most often so far."""

    def __init__(self, rows: int, count: int) -> None:
        self.count = count
        self._uses: list[Counter[int]] = [Counter() for _ in range(rows)]
        self.most_depth = rows - 1

    def used(self, row: int, experts: Sequence[int]) -> None:
        self._uses[row].update(experts)

    def predict(self, row: int, residual: Tensor) -> list[Prediction]:
        found = []
        for target in range(row + 1, min(row + self.depth + 1, len(self._uses))):
            best = self._uses[target].most_common(self.count)
            found += [
                Prediction((target, e), target, _BY_RANK[rank]) for rank, (e, _) in enumerate(best)
            ]
        return found


class NextLayerGate(Predictor):
    """A later layer's own router on the current residual: the usual way, and the one to beat. Fate
    (arXiv 2502.12224) norms the residual with the current layer's weights, not the later one's,
    which finds as many (lab/notes/experts.md). select: of each row.
    """

    def __init__(self, select: Sequence[SelectExperts]) -> None:
        self._select = select
        self.most_depth = len(select) - 1

    @torch.no_grad()
    def predict(self, row: int, residual: Tensor) -> list[Prediction]:
        targets = range(row + 1, min(row + self.depth + 1, len(self._select)))
        return [
            one for target in targets for one in likeliest(self._select[target](residual), target)
        ]


class Oracle(Predictor):
    """What a recorded run of the same tokens needed: the bound of every predictor. trace: (row,
    experts) of each.
    """

    def __init__(self, trace: Sequence[tuple[int, Sequence[int]]]) -> None:
        self.trace, self._at = list(trace), -1
        self.most_depth = max((row for row, _ in trace), default=1)

    def used(self, row: int, experts: Sequence[int]) -> None:
        self._at += 1

    def predict(self, row: int, residual: Tensor) -> list[Prediction]:
        found = []
        for step in range(1, self.depth + 1):
            if self._at + step < len(self.trace):
                target, experts = self.trace[self._at + step]
                if target > row:  # the next pass begins with another token, which may never come
                    found += [Prediction((target, expert), target, 1.0) for expert in experts]
        return found
