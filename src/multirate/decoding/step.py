"""One decoding step, whatever its kind: the interface between the loop (loop.py) and what is done
in a pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from multirate.decoding.costs import CostModel
from multirate.decoding.session import Session
from multirate.model.decoder import Decoder
from multirate.model.kv_cache import KVCache


@dataclass(frozen=True)
class Hole:
    """Committed tokens without K/V in some layers: slots [first, last), layers [start, stop)."""

    first: int
    last: int
    start: int
    stop: int


class Step(ABC):
    """What the loop does again and again until every sequence has ended.

    A step object may serve any number of generations, one after the other.

    slots: cache slots beyond prompt and new tokens that one step may write (rows that are
    rejected).
    taps: layers whose entering residuals of the prompt's tokens `prefilled` is to be given.
    lossless: whether the output is the base model's: the same text when greedy, the same
        distribution when sampling.
    repeats_text: whether a seed's sampled text is that of plain decoding with this seed.
    in_stages: of a step of drafts, as `Drafter.in_stages`.
    drafting_seconds: what drafts of the generation under way have taken outside of the decoder.
    looks_up: of a step of drafts, as `Drafter.looks_up`.
    tells_split: whether `DecodeStats.split` is known: its passes are ones that a decoder times.
    prompt_decoder: what reads the prompts; None: the session's decoder. Their K/V are then no
        other step's, nor are those that the prefix cache keeps for this one.
    """

    slots: int = 0
    taps: tuple[int, ...] = ()
    lossless: bool = True
    repeats_text: bool = True
    in_stages: bool = False
    prompt_decoder: Decoder | None = None
    drafting_seconds: float = 0.0
    looks_up: bool = False
    tells_split: bool = False

    @property
    def lossless_when_greedy(self) -> bool:
        """Whether the greedy text is the base model's, even if sampled text is not."""
        return self.lossless

    def begin(self, session: Session, resumed: bool) -> None:  # noqa: B027 - optional
        """A generation begins; forget the one before, which may have been interrupted.

        resumed: the last generation goes on: `session.cache` is its cache, cut to
        `session.stats.resumed` tokens, fewer than `usable` allowed.
        """

    def usable(self, cache: KVCache, length: int) -> int:
        """How many of the first `length` tokens of `cache`'s only sequence this step can go on
        from.

        The cache is as a finished generation left it. Its K/V of these tokens are of use (the
        prefix cache keeps no others); the question is what else the step has to remember.
        """
        return length

    def prefilled(  # noqa: B027 - optional
        self,
        session: Session,
        seqs: Sequence[int],
        hidden: Sequence[Tensor],
        taps: Sequence[Mapping[int, Tensor]],
    ) -> None:
        """The prompts of `seqs`, which go on, have been read.

        hidden[i]: h_L of the tokens read, [T_i, d] (after `resumed`, without the tokens kept).
        taps[i]: for each layer of `taps` the residuals entering it, [T_i, d].
        """

    @abstractmethod
    def run(self, session: Session) -> None:
        """One step: emits at least one token of every active sequence and commits the K/V of those
        before it.

        Afterwards `session.cache.lengths[b]` counts all tokens of sequence b but the last emitted
        one. A step that leaves K/V other than a prefill's calls `session.note_inexact`, or, of a
        narrow copy's, `session.note_narrow`.
        """

    def finish(self, session: Session) -> None:  # noqa: B027 - optional
        """All sequences have ended. Brings up to date what the prefix cache is about to keep."""

    def holes(self, seq: int) -> list[Hole]:
        """Where committed tokens of a sequence have no K/V (yet), for the invariants."""
        return []

    def costs(self, decoder: Decoder) -> CostModel | None:
        """What this kind of step costs here against plain decoding; None: unknown, so it is always
        used.

        Not during a generation: measuring may use the step's state.
        """
        return None

    def prepare(self) -> None:  # noqa: B027 - most have nothing to put off
        """Makes now what would else be made once it pays (copies of weights). Not during a
        generation.
        """

    def expect(self, rates: Sequence[float]) -> None:  # noqa: B027 - optional
        """Drafts of this kind were accepted at such rates by depth before, as a model card says."""

    def adapt(self, decoder: Decoder, on: bool) -> bool:
        """Whether steps are plain from now on where drafts have not been worth their time lately →
        whether this kind of step can. Not during a generation: it may measure costs.
        """
        return False
