"""The draft tree of one sequence while it grows from the accelerated stream, best-first within each
level. [ours]

A node's *path probability* is the stream's own estimate that verification arrives there: the
product of the draft probabilities on its path. A node pays while that exceeds what it costs
relative to a token: `draft_threshold` for a node that is itself drafted from (one more level),
`verify_threshold` for a leaf (one more verified row); both rise with the number of nodes where rows
do not all cost the same.

A tree that is a chain so far may end in a continuation: what followed the same tokens earlier in
the text. Its nodes are
leaves below one another: they cost rows and no levels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from multirate.decoding.acceptance_statistics import ContinuationRates, Origin


@dataclass
class DraftTree:
    """Nodes 1..n below node 0, the last token, in the order they were drafted from; leaves are
    added by `finish`.

    depth_limit: of the stream's own nodes. deepest: of a continuation's. drawn: nodes the stream
    drafted from. followed: nodes after these that are a continuation's; matched: what it was
    matched by. calibrated: from the stream's confidence in a token to the rate that is believed;
    None: they are the same. confidence: the stream's in every node, −1 for a continuation's. best:
    the stream's best token after the last one, and its confidence. trusted: the first nodes, a
    chain, that are emitted whatever the target model says; nothing else hangs above the last.
    """

    depth_limit: int
    deepest: int = 0
    drafted: int = 0
    continued: int = 0
    matched: int = 0
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    path_probability: list[float] = field(default_factory=lambda: [1.0])
    depth: list[int] = field(default_factory=lambda: [0])
    bits: list[int] = field(default_factory=lambda: [0])
    calibrated: Callable[[float], float] | None = None
    confidence: list[float] = field(default_factory=list)
    best: tuple[int, float] | None = None
    trusted: int = 0
    _leaves: list[tuple[float, int, int, float]] = field(
        default_factory=list
    )  # (path probability, parent, token, the stream's own probability)

    def add(
        self, parent: int, token: int, path_probability: float, confidence: float = -1.0
    ) -> int:
        """Appends a node and returns its number. Its ancestors' bits include itself (Rows.tree)."""
        node = len(self.tokens) + 1
        self.tokens.append(token)
        self.parents.append(parent)
        self.path_probability.append(path_probability)
        self.confidence.append(confidence)
        self.depth.append(self.depth[parent] + 1)
        self.bits.append(self.bits[parent] | 1 << (node - 1))
        return node

    def grow(
        self,
        frontier: Sequence[int],
        ids: Sequence[Sequence[int]],
        probs: Sequence[Sequence[float]],
        width: int,
        draft_threshold: np.ndarray,
        verify_threshold: np.ndarray,
        first: int = 0,
    ) -> list[int]:
        """Candidates below the frontier nodes, given their top tokens and probabilities → the nodes
        to draft from next.

        draft_threshold, verify_threshold [nodes]: least path probability of the n-th node, not
        falling. At most `width` candidates of at least `draft_threshold` become nodes; the
        others of at least the first of `verify_threshold` wait as leaves. Each node's candidates
        before `first` are passed over.
        """
        if not self.tokens or self.continued == len(self.tokens):
            self.best = (ids[0][0], probs[0][0])
        candidates: list[tuple[float, int, int, float]] = []
        for node, node_ids, node_probs in zip(frontier, ids, probs, strict=True):
            if self.depth[node] >= self.depth_limit:
                continue
            here, least = self.path_probability[node], 1.0
            for token, prob in list(zip(node_ids, node_probs, strict=True))[first:]:
                # tokens come best first, and none is worth more than a likelier one
                least = min(least, self.worth(prob))
                if here * least < verify_threshold[0]:
                    break
                candidates.append((here * least, node, token, prob))
        candidates.sort(key=lambda c: -c[0])
        chosen: list[int] = []
        for chance, parent, token, prob in candidates:
            deeper = self.depth[parent] + 1 < self.depth_limit
            if len(chosen) < width and deeper and chance >= draft_threshold[len(self.tokens)]:
                chosen.append(self.add(parent, token, chance, prob))
            else:
                self._leaves.append((chance, parent, token, prob))
        self.drafted += len(chosen)
        return chosen

    def trust(self, token: int) -> list[int]:
        """The last trusted node's only child, trusted as well → the nodes to draft from next."""
        node = self.add(self.trusted, token, 1.0)
        self.trusted += 1
        self.drafted += 1
        return [node] if self.depth[node] < self.depth_limit else []

    def worth(self, confidence: float) -> float:
        """The chance that a token of this confidence is accepted."""
        return confidence if self.calibrated is None else self.calibrated(confidence)

    @property
    def is_chain(self) -> bool:
        """Whether every node is below the one before."""
        return self.depth[-1] == len(self.tokens)

    def continuation_length(
        self,
        proposed: int,
        own: float,
        matched: int,
        rates: ContinuationRates,
        draft_threshold: np.ndarray,
        verify_threshold: np.ndarray,
        agrees: bool = True,
    ) -> int:
        """How many of `proposed` tokens below the last node of this chain make a better draft than
        going on with the stream. own: the probability of its best token. agrees: that this is the
        continuation's first. csrc/ngram.c, worth_continuing.

        Better: the sum over the nodes of each way of path probability less price is larger.
        """
        n, so_far = len(self.tokens), self.path_probability[-1]
        gain = other = 0.0
        first = rates.first_accepted if agrees else rates.first_against
        length, here = 0, so_far * float(first[matched])
        while length < proposed and here >= verify_threshold[n + length]:
            gain += here - float(verify_threshold[n + length])
            here *= float(rates.next_accepted[matched])
            length += 1
        here, i = so_far * own, n
        while i < len(verify_threshold) and i + 1 < self.depth_limit and here >= draft_threshold[i]:
            other += here - float(draft_threshold[i])
            here *= rates.draft_accepted
            i += 1
        if i < len(verify_threshold) and here >= verify_threshold[i]:
            other += here - float(verify_threshold[i])
        return length if gain >= other else 0

    @property
    def origin(self) -> Origin:
        """Where its nodes that are verified come from."""
        return Origin(self.drafted - self.trusted, self.continued, self.matched)

    @property
    def copied(self) -> range:
        """The numbers of a continuation's nodes."""
        return range(self.drafted + 1, self.drafted + self.continued + 1)

    def accepted(self, path: Sequence[int]) -> tuple[int, int]:
        """How many of the accepted `path`'s verified nodes the stream drew, and how many a
        continuation made.
        """
        below = self.drafted + self.continued
        return sum(self.trusted < node <= self.drafted for node in path), sum(
            self.drafted < node <= below for node in path
        )

    def continue_with(self, continuation: Sequence[int], matched: int) -> None:
        """The chain ends in these tokens."""
        for token in continuation:
            self.add(len(self.tokens), token, 0.0)
        self.continued, self.matched = len(continuation), matched

    def finish(self, verify_threshold: np.ndarray) -> int:
        """Adds the best leaves of at least `verify_threshold` [nodes], up to as many nodes in
        all; returns how many were added.
        """
        self._leaves.sort(key=lambda c: -c[0])
        before = len(self.tokens)
        for chance, parent, token, prob in self._leaves:
            if (
                len(self.tokens) >= len(verify_threshold)
                or chance < verify_threshold[len(self.tokens)]
            ):
                break
            self.add(parent, token, chance, prob)
        return len(self.tokens) - before
