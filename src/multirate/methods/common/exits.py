"""Leaving at the first of several layers where a score passes its threshold: what the methods that
do so share.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from multirate.decoding.depth import DepthPolicy, Leaving
from multirate.decoding.session import Session
from multirate.errors import UserError
from multirate.methods.common.exit_head import ExitHead
from multirate.model.decoder import Decoder

DEFAULT_EXITS = 4


def spaced_exits(num_layers: int, count: int = DEFAULT_EXITS) -> tuple[int, ...]:
    """Exits spaced evenly over the upper half of the layers, the first in the middle: below it a
    model that was not trained for exits has little to say. Fewer in a shallow model.
    """
    half = num_layers / 2
    spaced = {round(half + half * j / count) for j in range(count)}
    return tuple(sorted(exit for exit in spaced if 0 < exit < num_layers))


def check_exits(exits: Sequence[int], num_layers: int, owner: str) -> None:
    """UserError unless `exits` are rising layers of a model with `num_layers`. owner: whose."""
    rising = list(exits) == sorted(set(exits))
    if not rising or not all(0 < exit < num_layers for exit in exits):
        raise UserError(
            f"{owner} exits are {list(exits)}; accepted: rising numbers of layers from 1 to "
            f"{num_layers - 1} for this model"
        )


class ScoredExits(DepthPolicy):
    """A token leaves at the first of `exits` where its score is at least the threshold there, and
    is what `head` says of the residual.
    """

    def __init__(self, exits: Sequence[int], head: ExitHead) -> None:
        self.exits, self.head = tuple(exits), head
        self._session: Session | None = None

    def begin(self, session: Session) -> None:
        self._session = session

    def emitted(self, seq: int) -> int:
        """How many tokens the sequence has said: the place of the one that is being decoded."""
        assert self._session is not None
        return len(self._session.stops.new_tokens[seq])

    @abstractmethod
    def threshold(self, exit: int, seq: int) -> float | None:
        """The least score with which the sequence's token leaves here; None: it does not."""

    @abstractmethod
    def scores(
        self, exit: int, hidden: Tensor, seqs: Sequence[int]
    ) -> tuple[list[float], Tensor | None]:
        """The score of each row of hidden [n, d], the residuals of `seqs` here, and the head's
        logits where it took them to tell.
        """

    def read(self, exit: int, hidden: Tensor) -> Tensor:
        """What the head reads at an exit, of residuals [n, d]: themselves."""
        return hidden

    def leave(self, exit: int, hidden: Tensor, seqs: Sequence[int]) -> Leaving:
        scores, logits = self.scores(exit, hidden, seqs)
        thresholds = [self.threshold(exit, b) for b in seqs]
        # a score that is not a number passes nothing
        rows = [
            threshold is not None and score >= threshold
            for score, threshold in zip(scores, thresholds, strict=True)
        ]
        return Leaving(
            rows, self.head.widened(logits) if logits is not None and any(rows) else None
        )

    def logits(self, decoder: Decoder, exit: int, hidden: Tensor) -> Tensor:
        return self.head.widened(self.head.logits(self.read(exit, hidden)))
