"""Drafts, and the interface of the drafters that make them for the speculative step."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from torch import Tensor

from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.acceptance_statistics import ContinuationRates
from multirate.decoding.speculate.costs import CostModel, measure_costs
from multirate.runtime.decoder import Decoder
from multirate.runtime.fused import FusedStep
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import MAX_TREE_BIT, Rows
from multirate.runtime.transfer import to_device

MAX_TREE_NODES = MAX_TREE_BIT + 1


@dataclass
class Draft:
    """Proposed continuations of one sequence: a chain or a tree of n nodes below its last token.

    Node 0 is the last emitted token, which is not in the cache yet. Node i goes to slot `length +
    i`, at position `length + depth(i)`.
    """

    tokens: list[int]
    """The tokens of nodes 1..n. With n = 0 the step is a plain one."""
    parents: list[int]
    """parents[i-1] < i is the parent of node i; a chain is [0, 1, 2, …]."""
    hidden: Tensor | None = None
    """[n+1, d]: the target model's residual entering layer `start` for nodes 0..n. The drafter has
    then written these nodes' K/V of the layers below `start`. None: the step embeds the tokens and
    runs these layers itself.
    """
    unverified: frozenset[int] = frozenset()
    """Nodes that are accepted unverified when they are reached (dynamic mode: lossy). Each must be
    its parent's only child.
    """
    copied: range = range(0)
    """The nodes that were copied from the text, by number, for observers of the steps."""

    @classmethod
    def chain(cls, tokens: list[int], hidden: Tensor | None = None) -> Draft:
        """A draft in which every node continues the one before."""
        return cls(tokens, list(range(len(tokens))), hidden)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node continues the one before."""
        return self.parents == list(range(len(self.tokens)))

    @cached_property
    def depths(self) -> list[int]:
        """The depth of nodes 0..n: [n+1]; the last token has depth 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def child(self, node: int, token: int) -> int | None:
        """The first node below `node` that has this token; None if there is none."""
        if self.is_chain:
            return node + 1 if self.tokens[node : node + 1] == [token] else None
        return self._children.get((node, token))

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        children: dict[tuple[int, int], int] = {}
        for node, edge in enumerate(zip(self.parents, self.tokens, strict=True), start=1):
            children.setdefault(edge, node)
        return children

    def unverified_child(self, node: int) -> int | None:
        """The node below `node` that is accepted unverified; None if what follows it is
        verified.
        """
        return self._unverified_children.get(node)

    @cached_property
    def _unverified_children(self) -> dict[int, int]:
        return {self.parents[node - 1]: node for node in self.unverified}

    def cut(self, depth: int, nodes: int) -> Draft:
        """This draft up to its first node deeper than `depth`, and with at most `nodes` nodes. Node
        numbers stay the same.
        """
        count = min(len(self.tokens), nodes)
        if self.is_chain:
            count = min(count, depth)
        else:
            too_deep = (i for i, d in enumerate(self.depths[1 : count + 1]) if d > depth)
            count = next(too_deep, count)
        if count == len(self.tokens):
            return self
        return Draft(
            self.tokens[:count],
            self.parents[:count],
            None if self.hidden is None else self.hidden[: count + 1],
            frozenset(node for node in self.unverified if node <= count),
            self.copied,
        )

    def rows(self, seq: int, length: int) -> Rows:
        """The rows of nodes 0..n in a sequence of `length` committed tokens. Raises ValueError as
        `check` does.
        """
        self.check()
        if self.is_chain:
            return Rows.causal(seq, length, len(self.tokens) + 1)
        return Rows.draft_tree(seq, length, self.parents)

    def check(self) -> None:
        """Raises ValueError if the draft breaks the contract, which is a defect of the drafter."""
        n = len(self.tokens)
        if len(self.parents) != n or any(not 0 <= p <= i for i, p in enumerate(self.parents)):
            raise ValueError("every node of a draft needs a parent that comes before it")
        if not self.is_chain and n > MAX_TREE_NODES:
            raise ValueError(f"a tree draft has {n} nodes; the maximum is {MAX_TREE_NODES}")
        if self.hidden is not None and self.hidden.shape[0] != n + 1:
            raise ValueError(
                f"a draft of {n} nodes needs {n + 1} rows of hidden, got {self.hidden.shape[0]}"
            )
        for node in self.unverified:
            if not 1 <= node <= n or self.parents.count(self.parents[node - 1]) > 1:
                raise ValueError(f"unverified node {node} must be its parent's only child")


@dataclass
class Verified:
    """What verification by the target model found for a draft of n nodes."""

    path: list[int]
    """The accepted nodes, starting with 0, the last token."""
    tokens: list[int]
    """[n+1], of nodes 0..n."""
    hidden: Tensor
    """[n+1, d]: the final residual h_L of every node, including rejected ones."""
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    """For each layer of `Traits.taps`: the residuals entering it, [n+1, d]."""
    top: list[list[int]] | None = None
    """[n+1][k]: the target's k likeliest tokens after each node, the likeliest first, by its own
    logits before any sampling settings. None unless `Traits.top` asks for them.
    """

    def of_path(self, states: Tensor) -> Tensor:
        """The accepted nodes' rows of states [n+1, d] → [len(path), d]; a view if they are
        contiguous.
        """
        if self.path[-1] == len(self.path) - 1:
            return states[: len(self.path)]
        path = to_device(np.array(self.path, np.int64), states.device)
        return states.index_select(0, path)

    @property
    def accepted(self) -> Tensor:
        """h_L of the accepted nodes, [len(path), d]."""
        return self.of_path(self.hidden)


@dataclass(frozen=True)
class Traits:
    """What does not change about a drafter."""

    start: int = 0
    """Verification runs layers [start, L) on `Draft.hidden`. 0: drafts come from outside the
    model.
    """
    max_nodes: int = MAX_TREE_NODES
    """Maximum number of nodes in a draft; the loop reserves that many cache slots before each
    `draft`.
    """
    lossless: bool = True
    """Whether verification makes the output the base model's own. True for every drafter that keeps
    its contract.
    """
    taps: tuple[int, ...] = ()
    """Layers, at least `start`, whose entering residuals `prefill` and `accept` receive."""
    top: int = 0
    """How many of the target's likeliest tokens after each node `accept` receives."""
    adapts: bool = False
    """Whether the drafter decides by itself when not to draft. Otherwise `SpeculativeStep.adapt`
    can.
    """
    longest: int = 0
    """The longest match length that `matched` reports; 0: it reports none."""
    looks_up: bool = False
    """Whether it may draft by text lookup instead, which takes no time."""
    joins: bool = False
    """Whether sequences may join and leave a generation: `joined`, `leave`, `caches` and `settle`
    do what they say. Then `begin` comes before any prompt.
    """


@dataclass(frozen=True)
class DraftRequest:
    """What a step asks a drafter for."""

    seqs: Sequence[int]
    """The unfinished sequences, each of which wants a draft."""
    limits: Sequence[int]
    """The deepest useful level for each, at least 0: the tokens it may still emit, minus the one
    that verification adds. The step drops deeper nodes. If all limits are 0, make no draft.
    """
    sampler: Sampler
    """Has each sequence's tokens; the last one will be written at the slot after the committed
    ones.
    """
    worth: np.ndarray | None = None
    """[max_nodes], not falling: the minimum chance of acceptance with which the n-th node is worth
    verifying; None: unknown, or the drafter adapts by itself.
    """
    forced: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """The drafts of some sequences: what must follow their tokens. A drafter may draft otherwise.
    """
    rests: bool = True
    """Whether a drafter that adapts may leave the step without a draft."""
    refilled: bool = False
    """Whether other sequences take the place of those that end."""

    @property
    def last_tokens(self) -> list[int]:
        """The last token of each sequence."""
        return [self.sampler.tokens[b][-1] for b in self.seqs]

    @property
    def pairs(self) -> Iterator[tuple[int, int]]:
        """Each sequence and its limit."""
        return zip(self.seqs, self.limits, strict=True)

    def part(self, places: Sequence[int]) -> DraftRequest:
        """The same for the sequences at these places only."""
        seqs, limits = [self.seqs[i] for i in places], [self.limits[i] for i in places]
        return replace(self, seqs=seqs, limits=limits)


class Drafter(ABC):
    """Proposes tokens that the target model then verifies. Subclasses must write `draft`;
    everything else is optional.
    """

    traits = Traits()
    text_rates: ContinuationRates | None = None
    """Of a drafter that only copies from the text: how often what it copied was accepted. None: of
    any other drafter.
    """

    @property
    def highest_rejected(self) -> float | None:
        """For drafters that accept tokens unverified by a score: the highest score of this
        generation that was too low, or −inf. With a threshold above it, the text is the same. None:
        unknown.
        """
        return None

    def expect(self, rates: Sequence[float]) -> None:  # noqa: B027 - optional
        """Acceptance of its drafts by depth, as measured before: a first guess."""

    _costs: CostModel | None = None

    def costs(self, decoder: Decoder) -> CostModel:
        """Measured times of a draft step, a verification and a plain step on this machine. Measured
        once, in under half a second.

        Not during a generation, because the trial step may use the drafter's state.
        """
        if self._costs is None:
            self._costs = measure_costs(decoder, self.traits.start, self.trial_step())
        return self._costs

    def trial_step(self) -> Callable[[], object] | None:
        """A function that drafts one more token for one sequence, to be timed; None: what
        `measure_costs` assumes.
        """
        return None

    def begin(self, cache: KVCache, sampler: Sampler) -> None:  # noqa: B027 - a drafter without state needs none
        """A generation starts with an empty `cache`. Forget the one before, which may have been
        interrupted.
        """

    def usable(self, cache: KVCache, length: int) -> int:
        """How many of the first `length` tokens of `cache`'s only sequence this drafter can
        continue from after `resume`.

        The cache is as a finished generation left it. With the default, 0, every generation starts
        from the beginning.
        """
        return 0

    def resume(self, cache: KVCache, sampler: Sampler) -> None:
        """Replaces `begin` if the last generation continues. `cache` is its cache, cut to fewer
        tokens than `usable` returned. The next token is read again; `prefill` then receives h_L of
        it and of the later tokens.
        """
        self.begin(cache, sampler)

    def prefill(  # noqa: B027 - optional
        self,
        seqs: Sequence[int],
        prompts: Sequence[Sequence[int]],
        hidden_final: Sequence[Tensor],
        taps: Sequence[Mapping[int, Tensor]],
    ) -> None:
        """The target model has read the prompts.

        hidden_final[i]: h_L of every prompt token of seqs[i], [T_i, d]; after `resume` only of the
            tokens that were read.
        taps[i]: the same tokens' residuals entering each layer of `Traits.taps`.
        """

    @abstractmethod
    def draft(self, request: DraftRequest) -> list[Draft]:
        """One draft for each of the request's sequences."""

    def behind(self, seqs: Sequence[int]) -> int:
        """Number of rows that the next draft must catch up on because recent steps had no draft."""
        return 0

    def matches(self, seqs: Sequence[int], most: int) -> list[tuple[list[int], int]]:
        """For drafts by text lookup: the first `most` tokens of each sequence's next draft, and the
        match length, at most `Traits.longest`, that it would follow. Acceptance statistics are kept
        by this length.
        """
        return [([], 0)] * len(seqs)

    def fused_steps(self, request: DraftRequest) -> list[FusedStep] | None:
        """A whole step of each of the request's sequences, if the drafter can run it in one call.
        None: it cannot, and the step calls `draft`, verifies and calls `accept`.

        The tokens must be the same either way. The K/V of a sequence's last token and of the
        accepted ones go to the slots after its `cache.lengths`, uncommitted. A sequence that has
        had a fused step has only fused steps from then on.
        """
        return None

    def joined(self, seq: int, similar: Sequence[int]) -> None:  # noqa: B027 - optional
        """A sequence has taken a free place; its `prefill` comes next. similar: a text that the
        answer is likely to repeat.
        """

    def leave(self, seq: int) -> None:  # noqa: B027 - optional
        """The sequence has left; forget what is known of it."""

    def caches(self) -> list[KVCache]:
        """The drafter's own K/V of the same sequences."""
        return []

    def settle(self, seq: int) -> int:
        """Brings the sequence's K/V in `caches` up to date, as far as possible. Returns how many of
        its first committed tokens have them, or more than there are if all have.
        """
        return sys.maxsize

    def interrupted(self) -> None:  # noqa: B027 - optional
        """The time until the next step is no step's."""

    def accept(self, seq: int, verified: Verified) -> None:  # noqa: B027 - optional
        """Sequence `seq` continues with the nodes of `verified.path`. The cache is committed
        already; `sampler.tokens[seq]` ends in the next step's last token. Not called for a sequence
        that has just finished.
        """
