"""How deep a token's row goes: the interface of methods that leave early, without verification."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from multirate.decoding.session import Session
from multirate.model.decoder import Decoder, LayerAdapter

LayerRange = tuple[int, int]
"""Layers [start, stop)."""


@dataclass(frozen=True)
class Leaving:
    """What a policy says at an exit. rows [n]: which rows leave here.

    logits: [n, V], where the policy has computed them to decide (a confidence does), so that the
    step does not compute them again; None: the step asks `DepthPolicy.logits` for the rows that
    leave.
    """

    rows: Sequence[bool]
    logits: Tensor | None = None


class DepthPolicy(ABC):  # noqa: B024 - a policy overrides `leave` or `schedule`
    """Says after which layer each row of a batch leaves. It knows nothing of the cache or of the
    loop.

    exits: layers after which rows may leave: numbers of layers run, rising, above 0 and below L.
    lossless: whether the output is the base model's all the same. Leaving early never is, unless
        the policy knows that the layers left out change nothing.
    adapters: what changes layers for the accelerated rows, where there are any.
    checks_waiting: whether the policy is shown the last layer's logits of the tokens that left and
        whose deeper layers ran later (`final_logits`), which takes the LM head for each of them.
    """

    exits: tuple[int, ...] = ()
    lossless: bool = False
    adapters: Mapping[int, LayerAdapter] | None = None
    checks_waiting: bool = False

    def begin(self, session: Session) -> None:  # noqa: B027 - optional
        """A generation begins; forget the one before."""

    def after_prompt(self, hidden: Tensor, seqs: Sequence[int]) -> None:  # noqa: B027 - optional
        """The prompts of `seqs` have been read. hidden [n, d]: h_L of their last tokens."""

    def after_token(  # noqa: B027 - optional
        self, layers: int, hidden: Tensor, seqs: Sequence[int]
    ) -> None:
        """The tokens of `seqs` are done after `layers` layers, with residuals hidden [n, d]."""

    def final_logits(  # noqa: B027 - optional
        self, logits: Sequence[Tensor], seqs: Sequence[int]
    ) -> None:
        """With `checks_waiting`: logits [m, V] of each of `seqs`, whose last token has run all
        layers, and with it m − 1 tokens that had waited, the oldest first.
        """

    def schedule(self, session: Session, seqs: Sequence[int]) -> Sequence[LayerRange] | None:
        """The layers that all rows of this step run, as rising ranges; None: rows leave at `exits`.

        Asked once per step, before it, and may set `exits` anew. `session.cache.lengths[b]` is the
        position of b's row.
        """
        return None

    def start_accelerated(
        self, layer: int, hidden: Tensor, seqs: Sequence[int], last: Tensor | None
    ) -> Tensor | None:
        """The residuals [n, d] with which an accelerated row of each of `seqs` enters `layer`, to
        run beside the token's own up to the next exit, where it is what the policy is shown.

        Asked at layer 0 and at every exit but the last, of the rows that go on. hidden [n, d]: the
        tokens' own residuals there; last: the accelerated ones', None at layer 0. None (at layer
        0): there are no such rows.
        """
        return None

    def leave(self, exit: int, hidden: Tensor, seqs: Sequence[int]) -> Leaving:
        """Which rows leave after `exit` layers. hidden [n, d]: the residual of each of `seqs`
        there, the accelerated row's where there is one.
        """
        return Leaving([False] * len(seqs))

    def logits(self, decoder: Decoder, exit: int, hidden: Tensor) -> Tensor:
        """Logits [n, V] of rows that left after `exit` layers with residuals hidden [n, d], those
        that `leave` was shown.

        The default reads them as it reads the last layer's: final norm and LM head.
        """
        return decoder.logits(hidden)
