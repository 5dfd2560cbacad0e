"""One decoding step: the interface between the loop (loop.py) and what a pass does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from multirate.decoding.session import Session
from multirate.decoding.speculate.costs import CostModel
from multirate.runtime.decoder import Decoder
from multirate.runtime.kv_cache import KVCache


@dataclass(frozen=True)
class Hole:
    """Committed tokens without K/V in some layers: slots [first, last), layers [start, stop)."""

    first: int
    last: int
    start: int
    stop: int


class Step(ABC):
    """What the loop repeats until every sequence has ended. A step object may serve any number of
    generations, one after another.
    """

    slots: int = 0
    """Cache slots beyond prompt and new tokens that one step may write (rows that are rejected)."""
    taps: tuple[int, ...] = ()
    """Layers whose entering residuals of the prompt's tokens `prefilled` receives."""
    lossless: bool = True
    """Whether the text is plain decoding's, greedy or sampled with the same seed."""
    drafting_seconds: float = 0.0
    """Time that drafts of the current generation have taken outside the decoder."""
    looks_up: bool = False
    """Of a speculative step: as `Drafter.looks_up`."""
    tells_split: bool = False
    """Whether `DecodeStats.split` is known, because a decoder times all its passes."""

    def begin(self, session: Session, resumed: bool) -> None:  # noqa: B027 - optional
        """A generation starts. Forget the one before, which may have been interrupted.

        resumed: the last generation continues: `session.cache` is its cache, cut to
        `session.stats.resumed` tokens, fewer than `usable` returned.
        """

    def usable(self, cache: KVCache, length: int) -> int:
        """How many of the first `length` tokens of `cache`'s only sequence this step can continue
        from.

        The cache is as a finished generation left it, and its K/V of these tokens are valid. The
        answer depends on what else the step has to remember.
        """
        return length

    def prefilled(  # noqa: B027 - optional
        self,
        session: Session,
        seqs: Sequence[int],
        hidden: Sequence[Tensor],
        taps: Sequence[Mapping[int, Tensor]],
    ) -> None:
        """The prompts of `seqs`, which continue, have been read.

        hidden[i]: h_L of the tokens read, [T_i, d]; with `resumed`, without the tokens kept.
        taps[i]: for each layer of `taps` the residuals entering it, [T_i, d].
        """

    @abstractmethod
    def run(self, session: Session) -> None:
        """One step: emits at least one token of every active sequence, and commits the K/V of the
        tokens before it.

        Afterwards `session.cache.lengths[b]` counts all tokens of sequence b except the last
        emitted one. A step that leaves other K/V than a prefill calls `session.note_inexact`.
        """

    def finish(self, session: Session) -> None:  # noqa: B027 - optional
        """All sequences have ended. Brings what the prefix cache will keep up to date."""

    # -- for sequences that come and go (batch.py) ------------------------------------------------

    joins: bool = False
    """Whether sequences may join and leave a generation. Then `begin` is called with places that
    have no prompts yet.
    """

    def joined(self, session: Session, seq: int, similar: Sequence[int]) -> None:  # noqa: B027
        """A sequence has taken a place; `prefilled` comes next. similar: a text that the answer is
        likely to repeat.
        """

    def leave(self, seq: int) -> None:  # noqa: B027 - optional
        """The sequence has left its place; forget what is known of it."""

    def caches(self) -> list[KVCache]:
        """K/V of the same sequences that the step keeps beside the session's."""
        return []

    def settle(self, session: Session, seq: int) -> int:
        """Brings the K/V of `caches` up to date, as far as possible. Returns how many of the
        sequence's first committed tokens have all of them.
        """
        return session.cache.lengths[seq]

    def interrupted(self) -> None:  # noqa: B027 - optional
        """The last step has ended; the time until the next one belongs to no step."""

    def holes(self, seq: int) -> list[Hole]:
        """Committed tokens of a sequence that have no K/V (yet) in some layers, for the
        invariants.
        """
        return []

    def costs(self, decoder: Decoder) -> CostModel | None:
        """Measured costs of this kind of step and of plain decoding; None: unknown, so the step is
        always used.

        Not during a generation, because measuring may use the step's state.
        """
        return None

    def expect(self, rates: Sequence[float]) -> None:  # noqa: B027 - optional
        """Acceptance rates by depth of earlier drafts of this kind, from a model card."""

    def adapt(self, decoder: Decoder, on: bool) -> bool:
        """Turns adaptation on or off: from now on, steps decode plainly while drafts are not worth
        their time. Returns whether this kind of step can. Not during a generation, because it may
        measure costs.
        """
        return False
