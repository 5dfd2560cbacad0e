"""Leaving at the first of several layers where a score passes its threshold: what the methods that
do so share.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from multirate.decoding.depth import DepthPolicy, Leaving
from multirate.decoding.session import Session
from multirate.errors import UserError
from multirate.lab.depth_baselines._shared.exit_head import ExitHead
from multirate.methods._shared.config import MethodConfig
from multirate.methods._shared.shape import BaseShape
from multirate.methods.spec import PROBABILITIES, DynamicMode, MethodSpec, register
from multirate.runtime.decoder import Decoder


def spaced_exits(num_layers: int, count: int, first: float) -> tuple[int, ...]:
    """`count` exits spaced evenly from a share `first` of the layers to the last one, which is
    none. Fewer in a shallow model.
    """
    shares = [first + (1 - first) * j / count for j in range(count)]
    spaced = {max(1, round(num_layers * share)) for share in shares}
    return tuple(sorted(exit for exit in spaced if exit < num_layers))


def rises(places: Sequence[int], least: int) -> bool:
    """Whether there are any, increasing from `least` on."""
    return bool(places) and places[0] >= least and all(a < b for a, b in pairwise(places))


def check_exits(exits: Sequence[int], num_layers: int, owner: str) -> None:
    """Raises UserError unless `exits` are increasing layers of a model with `num_layers`. owner:
    whose exits they are, for the message.
    """
    if exits and not (rises(exits, 1) and exits[-1] < num_layers):
        raise UserError(
            f"{owner} exits are {list(exits)}; accepted: increasing layer counts from 1 to "
            f"{num_layers - 1} for this model"
        )


@dataclass(frozen=True)
class ExitsConfig(MethodConfig):
    exits: tuple[int, ...]
    """Layers after which a token may leave, in increasing order."""
    draft_vocab: int | None = None
    """Size of a reduced head for exits, which covers the most frequent tokens of the training
    data's answers. Null: the whole head. [ours]
    """

    def check(self) -> None:
        self.require(rises(self.exits, 1), "exits", "increasing layer counts of at least 1")
        self.require_draft_vocab()

    def check_base(self, base: BaseShape) -> None:
        check_exits(self.exits, base.num_layers, f"{self.METHOD}'s")
        self.require_draft_vocab(base.vocab_size)


@dataclass(frozen=True)
class ThresholdConfig(MethodConfig):
    """Base of the decoding settings of methods with one threshold for all exits."""

    threshold: float | None = 0.9
    """Minimum probability with which a token leaves, from 0 to 1. Null: no token leaves."""

    def check(self) -> None:
        super().check()
        self.require_share("threshold")


def register_exits(**given: Any) -> MethodSpec:
    """Registers a lossy method whose tokens leave early: a MethodSpec's fields. Its dynamic mode
    moves the one threshold of the method's probabilities, where it has no other.
    """
    mode = DynamicMode(
        gates=lambda module: module.exits,
        settings=lambda module, threshold: {"threshold": threshold},
        path=PROBABILITIES,
    )
    return register(MethodSpec(**{"dynamic": mode, "role": "depth", "lossless": False, **given}))


class ScoredExits(DepthPolicy):
    """A token leaves at the first of `exits` where its score is at least the threshold; `head`
    chooses the token from the residual there.
    """

    def __init__(self, exits: Sequence[int], head: ExitHead) -> None:
        self.exits, self.head = tuple(exits), head
        self._session: Session | None = None

    def begin(self, session: Session) -> None:
        self._session = session

    def emitted(self, seq: int) -> int:
        """How many tokens the sequence has emitted: the index of the token being decoded."""
        assert self._session is not None
        return len(self._session.stops.new_tokens[seq])

    @abstractmethod
    def threshold(self, exit: int, seq: int) -> float | None:
        """The minimum score with which the sequence's token leaves here, or None if it does not
        leave.
        """

    @abstractmethod
    def scores(
        self, exit: int, hidden: Tensor, seqs: Sequence[int]
    ) -> tuple[list[float], Tensor | None]:
        """The score of each row of hidden [n, d], the residuals of `seqs` here, and the head's
        logits if the scores needed them.
        """

    def read(self, exit: int, hidden: Tensor) -> Tensor:
        """What the head reads at an exit, given residuals [n, d]. Default: the residuals."""
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
