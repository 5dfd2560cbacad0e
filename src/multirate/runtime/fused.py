"""Whole speculative steps in one call: the interface of decoders that draft, verify and accept by
themselves, as the C kernel does.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multirate.runtime.kv_cache import KVCache
from multirate.runtime.noise import Noise

CAUGHT_UP_WITHIN = 32
"""Maximum number of rows that a drafter catches up on in its first draft level; further rows are
caught up on before it.
"""
ChoosePath = Callable[[Tensor, int, list[int], list[int]], tuple[list[int], list[int]]]
"""(logits [n + 1, V], sequence, a draft's tokens [n], their parents [n]) → the accepted nodes from
node 0 on, and the token that is emitted after each.
"""


class TokenChooser(Protocol):
    """How a generation's tokens are chosen: decoding/sampler.py."""

    def by_argmax(self, seqs: Sequence[int]) -> bool:
        """Whether all these sequences' tokens are the argmax of logits and `noises`."""

    def noises(self, seqs: Sequence[int], ahead: Sequence[int]) -> list[Noise] | None:
        """What is added to the logits of each sequence's token `ahead` places after the next one;
        None: nothing.
        """


class OtherTexts(Protocol):
    """Texts that drafts are copied from: decoding/speculate/given_texts.py."""

    @property
    def tokens(self) -> NDArray[np.int32]:
        """[count] one text after another."""

    @property
    def order(self) -> NDArray[np.int32]:
        """[count] positions, sorted by the tokens that begin there."""


class TextRates(Protocol):
    """By match length, how often a continuation's tokens are accepted, float64 each:
    decoding/speculate/acceptance_statistics.py.
    """

    first_accepted: NDArray[np.float64]
    first_against: NDArray[np.float64]
    next_accepted: NDArray[np.float64]


class ConfidenceCounts(Protocol):
    """By confidence, drafted nodes and accepted ones, float64 [bins] each."""

    tries: NDArray[np.float64]
    hits: NDArray[np.float64]


@dataclass(frozen=True)
class Unverified:
    """Dynamic mode (lossy): a branch's best token is accepted without verification if its score is
    at least `threshold`, at most `nodes` of them on top of the others.
    """

    threshold: float
    nodes: int
    by_agreement: bool
    """The score is `DraftBranch.agreement`, not the token's probability."""


@dataclass(frozen=True)
class DraftShape:
    """Limits of a draft tree that stay the same."""

    nodes: int
    width: int
    candidates: int
    sharpness: float
    min_probability: float
    backfill: bool
    """Whether the branch has K/V of its own, so that accepted tokens run through it again."""
    unverified: Unverified | None = None


@dataclass(frozen=True)
class Lookups:
    """Where drafts are looked up."""

    longest: int
    """Maximum match length in the text itself; 0: no lookup."""
    automaton: bool = False
    """Whether longer matches are found as well, and reported with this length."""
    given: OtherTexts | None = None
    """Other texts to search as well."""


@dataclass(frozen=True)
class Growth:
    """How one step drafts."""

    depth: int
    """Most levels of the branch."""
    draft_threshold: NDArray[np.float64] | None = None
    """[nodes] least path probability of the n-th node to be drafted from; None: 0."""
    verify_threshold: NDArray[np.float64] | None = None
    """[nodes] the same to be verified."""
    deepest: int | None = None
    """The deepest useful node; None: `depth`."""
    draft_accepted: float = 1.0
    """The chance for the next level of the branch's own draft."""
    own: bool = True
    """False: the draft is `deepest` tokens of the text's continuation, 0 for a plain step."""
    forced: Sequence[int] | None = None
    """Without a branch, or with `own` False: these tokens are the draft, in the place of the text's
    continuation.
    """


@functools.cache
def copying(count: int) -> Growth:
    """A step whose draft is `count` tokens of the text's continuation; 0: a plain step."""
    return Growth(0, deepest=count, own=False)


@dataclass(frozen=True)
class DraftedNodes:
    """What a step drafted: tokens [n] and parents [n] of nodes 1..n, `drafted` of them the
    branch's, then `continued` from the text after a match of `matched` tokens.
    """

    tokens: list[int]
    parents: list[int]
    confidence: list[float]
    """[n] the branch's probability of each node; −1: a node from the text."""
    unverified: set[int]
    """Nodes that are accepted without verification."""
    best: tuple[int, float] | None
    """The branch's best token after the last one and its probability; None: it did not run."""
    drafted: int
    continued: int
    matched: int


@dataclass(slots=True)  # frozen ones take three times as long to make
class FusedStep:
    """A finished step of one sequence."""

    tokens: list[int]
    """The tokens that it emits, the bonus token last."""
    drafted: int
    """Number of nodes in its draft."""
    levels: int
    """Depth of its draft."""
    own: int = 0
    """How many of the draft's nodes, the first ones, the branch drafted; the rest is the text's."""
    unverified: frozenset[int] = frozenset()
    """Places in `tokens` of the ones that were accepted unverified."""
    draft_seconds: float = field(default=0.0, compare=False)
    """How long drafting took."""


@dataclass
class PendingTokens:
    """Tokens that a branch's own layer has not read with their true carried residuals.

    carried: [len(ids), d] in pieces, what is carried of the token before each; empty for a branch
    that reads none.
    """

    ids: list[int] = field(default_factory=list)
    carried: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: Sequence[int], carried: Tensor | None) -> None:
        self.ids += ids
        if carried is not None:
            self.carried.append(carried)

    def keep_newest(self, count: int | None) -> bool:
        """Only the last `count` tokens; None: all. Returns whether there were more."""
        if count is None or len(self.ids) <= count:
            return False
        self.ids = self.ids[-count:]
        self.carried = [torch.cat(self.carried)[-count:].clone()] if self.carried else []
        return True

    def keep(self, count: int) -> None:
        """Only the first `count` tokens."""
        self.ids = self.ids[:count]
        known = self.ids and self.carried
        self.carried = [torch.cat(self.carried)[:count].clone()] if known else []

    def clear(self) -> None:
        self.ids, self.carried = [], []


class FusedSequences(ABC):
    """The fused steps of a generation's sequences. A sequence that has had one has only fused ones
    from then on.
    """

    highest_rejected: float
    """The highest score since `begin` that was too low to be accepted unverified; −inf: none."""

    @abstractmethod
    def begin(self, cache: KVCache, chooser: TokenChooser, choose_path: ChoosePath) -> None:
        """A generation over `cache` begins. choose_path: for tokens that are not an argmax."""

    @abstractmethod
    def __contains__(self, seq: int) -> bool: ...

    @abstractmethod
    def enter(
        self,
        seq: int,
        ids: Sequence[int],
        carried: Tensor | None = None,
        text: Sequence[int] | None = None,
        rates: TextRates | None = None,
        calibration: ConfidenceCounts | None = None,
    ) -> None:
        """A sequence's first fused step comes next: it refreshes all `ids` but the last, which it
        begins with. carried: [len(ids), d], if any. text: all tokens so far; None: nothing is
        looked up. Drafts follow the text by `rates`, and confidence counts by `calibration`.
        """

    @abstractmethod
    def leave(self, seq: int) -> None:
        """The sequence has left; another may enter in its place."""

    @abstractmethod
    def settle(self, seq: int) -> None:
        """The branch's own layer reads all committed tokens that it has not read."""

    @abstractmethod
    def run(self, seqs: Sequence[int], growths: Sequence[Growth]) -> list[FusedStep]:
        """A step of each sequence."""

    @abstractmethod
    def nodes(self, seq: int) -> DraftedNodes:
        """The draft of the sequence's last step."""

    @abstractmethod
    def look_up(self, seq: int, most: int) -> tuple[list[int], int]:
        """What the text had after the tokens it ends in, as `TextSource.look_up`."""

    @abstractmethod
    def behind(self, seq: int) -> int:
        """Committed tokens that the branch's own layer has not read."""

    @abstractmethod
    def unread(self, seq: int) -> PendingTokens:
        """These tokens, but for those that enter with the next draft."""

    @abstractmethod
    def draft_costs(self, rates: TextRates) -> tuple[float, float]:
        """(seconds of a draft that do not depend on its length, seconds of a level), measured
        inside a step. Not during a generation.
        """
