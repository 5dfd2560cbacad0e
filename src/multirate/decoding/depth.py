"""The interface of methods that leave early, without verification: after how many layers a token's
row leaves.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from multirate.decoding.session import Session
from multirate.runtime.decoder import Decoder, LayerAdapter

LayerRange = tuple[int, int]
"""Layers [start, stop)."""


@dataclass(frozen=True)
class Leaving:
    """A policy's decision at an exit."""

    rows: Sequence[bool]
    """[n]: which rows leave here."""
    logits: Tensor | None = None
    """[n, V], if the policy computed them to decide (confidences do), so that the step need not
    compute them again. None: the step calls `DepthPolicy.logits` for the rows that leave.
    """


class DepthPolicy(ABC):  # noqa: B024 - a policy overrides `leave` or `schedule`
    """Decides after which layer each row of a batch leaves. Independent of the cache and the
    loop.
    """

    exits: tuple[int, ...] = ()
    """Layers after which rows may leave: increasing layer counts above 0 and below L."""
    lossless: bool = False
    """Whether the output is still the base model's. It is not if tokens leave early, unless the
    policy knows that the skipped layers change nothing.
    """
    adapters: Mapping[int, LayerAdapter] | None = None
    """The layers' adapters for the adapter rows, if any."""

    def begin(self, session: Session) -> None:  # noqa: B027 - optional
        """A generation starts; forget the one before."""

    def after_prompt(self, hidden: Tensor, seqs: Sequence[int]) -> None:  # noqa: B027 - optional
        """The prompts of `seqs` have been read. hidden [n, d]: h_L of their last tokens."""

    def after_token(  # noqa: B027 - optional
        self, layers: int, hidden: Tensor, seqs: Sequence[int]
    ) -> None:
        """The tokens of `seqs` are finished after `layers` layers, with residuals hidden [n, d]."""

    def schedule(self, session: Session, seqs: Sequence[int]) -> Sequence[LayerRange] | None:
        """The layers that all rows of this step run, as increasing ranges; None: rows leave at
        `exits`.

        Called once before each step, and may set `exits`. `session.cache.lengths[b]` is the
        position of b's row.
        """
        return None

    def start_accelerated(
        self, layer: int, hidden: Tensor, seqs: Sequence[int], last: Tensor | None
    ) -> Tensor | None:
        """The residuals [n, d] with which an adapter row for each of `seqs` enters `layer`. It runs
        beside the token's own row up to the next exit, where the policy sees its residual.

        Called at layer 0 and at every exit but the last, for the rows that continue. hidden [n, d]:
        the tokens' own residuals there; last: the adapter rows', None at layer 0. Return None (at
        layer 0) for no such rows.
        """
        return None

    def leave(self, exit: int, hidden: Tensor, seqs: Sequence[int]) -> Leaving:
        """Which rows leave after `exit` layers. hidden [n, d]: the residual of each of `seqs`
        there, or its adapter row's.
        """
        return Leaving([False] * len(seqs))

    def logits(self, decoder: Decoder, exit: int, hidden: Tensor) -> Tensor:
        """Logits [n, V] of rows that left after `exit` layers, from the residuals [n, d] that
        `leave` received.

        Default: final norm and LM head, as after the last layer.
        """
        return decoder.logits(hidden)
