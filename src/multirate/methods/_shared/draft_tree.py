"""The draft tree of one sequence, while it grows from a trained draft branch, best-first within
each level. [ours]

A node's *path probability* is the draft branch's estimate that verification reaches it: the product
of the draft probabilities on its path. A node is worth its cost while its path probability exceeds
that cost, in tokens: `draft_threshold` for a node that is itself drafted from (one more level),
`verify_threshold` for a leaf (one more verified row). Both rise with the number of nodes if rows do
not all cost the same.

A tree that is still a chain may end in a continuation: what followed the same tokens earlier in the
text. Its nodes are leaves below one another; they cost rows but no levels.

A token that is accepted unverified (dynamic mode) is its parent's only child and has its parent's
path probability. It counts neither as a level nor as a node of the limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from multirate.decoding.speculate.acceptance_statistics import ContinuationRates, Origin


class _Candidate(NamedTuple):
    path_probability: float
    parent: int
    token: int
    confidence: float  # the branch's own probability
    unverified: bool


@dataclass
class DraftTree:
    """Nodes 1..n below node 0, the last token, in the order they were drafted from; `finish` adds
    the leaves.

    depth_limit: levels of the draft branch's own nodes, without tokens accepted unverified.
    deepest: maximum depth of any node, at least depth_limit.
    nodes: maximum number of nodes, without tokens accepted unverified; None: the number of
        thresholds, which is a limit in any case.
    min_probability: a node with less confidence is not drafted from.
    drafted: nodes that the draft branch drafted from.
    continued: further nodes, from text lookup; matched: their match length.
    calibrated: maps the draft branch's confidence to the expected acceptance rate; None: unchanged.
    confidence: the draft branch's, for every node; −1 for continuations.
    best: the draft branch's best token after the last one, and its confidence.
    unverified: nodes that are accepted unverified.
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
    levels: list[int] = field(default_factory=lambda: [0])
    bits: list[int] = field(default_factory=lambda: [0])
    calibrated: Callable[[float], float] | None = None
    confidence: list[float] = field(default_factory=list)
    best: tuple[int, float] | None = None
    nodes: int | None = None
    min_probability: float = 0.0
    unverified: set[int] = field(default_factory=set)
    _leaves: list[_Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.deepest = max(self.deepest, self.depth_limit)

    def add(
        self,
        parent: int,
        token: int,
        path_probability: float,
        confidence: float = -1.0,
        unverified: bool = False,
    ) -> int:
        """Appends a node and returns its number. Its ancestors' bits include itself (Rows.tree)."""
        node = len(self.tokens) + 1
        self.tokens.append(token)
        self.parents.append(parent)
        self.path_probability.append(path_probability)
        self.confidence.append(confidence)
        self.depth.append(self.depth[parent] + 1)
        self.levels.append(self.levels[parent] + (not unverified))
        if unverified:
            self.unverified.add(node)
        self.bits.append(self.bits[parent] | 1 << (node - 1))
        return node

    def budget(self, capacity: int) -> int:
        """Nodes that it may have now, `capacity` at most."""
        return capacity if self.nodes is None else min(self.nodes + len(self.unverified), capacity)

    def grow(
        self,
        frontier: Sequence[int],
        ids: Sequence[Sequence[int]],
        probs: Sequence[Sequence[float]],
        width: int,
        draft_threshold: np.ndarray,
        verify_threshold: np.ndarray,
        first: int = 0,
        unverified: Sequence[bool] = (),
    ) -> list[int]:
        """Adds candidates below the frontier nodes, given their top tokens and probabilities;
        returns the nodes to draft from next.

        draft_threshold, verify_threshold [nodes]: minimum path probability of the n-th node, not
        falling. At most `width` candidates of at least `draft_threshold` become nodes; others of at
        least the first `verify_threshold` wait as leaves. Each node's candidates before `first` are
        skipped. unverified: for each frontier node, whether its best candidate is accepted
        unverified and is then the only one; empty: none is.
        """
        if not self.tokens or self.continued == len(self.tokens):
            self.best = (ids[0][0], probs[0][0])
        candidates: list[_Candidate] = []
        sure = unverified or [False] * len(frontier)
        for node, node_ids, node_probs, only in zip(frontier, ids, probs, sure, strict=True):
            if self.levels[node] >= self.depth_limit or self.depth[node] >= self.deepest:
                continue
            here, least = self.path_probability[node], 1.0
            found = list(zip(node_ids, node_probs, strict=True))[: 1 if only else None]
            for token, prob in found[first:]:
                # tokens come best first, and none is worth more than a likelier one
                if not only:
                    least = min(least, self.worth(prob))
                if here * least < verify_threshold[0]:
                    break
                candidates.append(_Candidate(here * least, node, token, prob, only))
        candidates.sort(key=lambda c: -c.path_probability)
        chosen: list[int] = []
        for one in candidates:
            if (
                len(chosen) < width
                and len(self.tokens) < self.budget(len(draft_threshold))
                and self.levels[one.parent] + (not one.unverified) < self.depth_limit
                and self.depth[one.parent] + 1 < self.deepest
                and one.path_probability >= draft_threshold[len(self.tokens)]
                and one.confidence >= self.min_probability
            ):
                chosen.append(self._add_candidate(one))
            else:
                self._leaves.append(one)
        self.drafted += len(chosen)
        return chosen

    def _add_candidate(self, one: _Candidate) -> int:
        return self.add(one.parent, one.token, one.path_probability, one.confidence, one.unverified)

    @property
    def best_is_unverified(self) -> bool:
        """Whether the draft branch's best token after the last one is accepted unverified."""
        return any(self.parents[node - 1] == 0 for node in self.unverified)

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
        unverified: bool = False,
    ) -> int:
        """How many of the `proposed` tokens below the last node of this chain make a better draft
        than continuing with the draft branch. As csrc/lookup.c, worth_continuing.

        own: the probability of the draft branch's best token. agrees: whether this is the
        continuation's first. unverified: whether it is accepted unverified. Better means that the
        sum of path probability minus price over its nodes is larger.
        """
        if unverified and not agrees:
            return 0  # nothing else can follow
        n, so_far = len(self.tokens), self.path_probability[-1]
        gain = other = 0.0
        first = rates.first_accepted if agrees else rates.first_against
        length, here = 0, so_far * (1.0 if unverified else float(first[matched]))
        while length < proposed and here >= verify_threshold[n + length]:
            gain += here - float(verify_threshold[n + length])
            here *= float(rates.next_accepted[matched])
            length += 1
        here, i = so_far * (1.0 if unverified else own), n
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
        unverified = sum(node <= self.drafted for node in self.unverified)
        return Origin(self.drafted - unverified, self.continued, self.matched)

    @property
    def copied(self) -> range:
        """The numbers of a continuation's nodes."""
        return range(self.drafted + 1, self.drafted + self.continued + 1)

    def accepted(self, path: Sequence[int]) -> tuple[int, int]:
        """How many of the accepted `path`'s verified nodes the branch drew, and how many a
        continuation made.
        """
        below = self.drafted + self.continued
        return sum(0 < node <= self.drafted and node not in self.unverified for node in path), sum(
            self.drafted < node <= below for node in path
        )

    def continue_with(
        self, continuation: Sequence[int], matched: int, unverified: bool = False
    ) -> None:
        """Ends the chain in these tokens; the first may be the draft branch's own, accepted
        unverified.
        """
        for i, token in enumerate(continuation):
            self.add(len(self.tokens), token, 0.0, unverified=unverified and not i)
        self.continued, self.matched = len(continuation), matched

    def finish(self, verify_threshold: np.ndarray) -> int:
        """Adds the best leaves of at least `verify_threshold` [nodes], up to as many nodes in
        all; returns how many were added.
        """
        self._leaves.sort(key=lambda c: -c.path_probability)
        before = len(self.tokens)
        for leaf in self._leaves:
            if (
                len(self.tokens) >= self.budget(len(verify_threshold))
                or leaf.path_probability < verify_threshold[len(self.tokens)]
            ):
                break
            self._add_candidate(leaf)
        return len(self.tokens) - before
