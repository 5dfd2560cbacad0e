"""What a method hands the speculative loop: drafts, and the interface of those who make them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import Tensor

from multirate.decoding.costs import CostModel, measure_costs
from multirate.decoding.sampler import Sampler
from multirate.model.decoder import Decoder
from multirate.model.kv_cache import KVCache
from multirate.model.rows import MAX_TREE_BIT, Rows
from multirate.model.transfer import to_device

MAX_TREE_NODES = MAX_TREE_BIT + 1


@dataclass
class Draft:
    """Proposed continuations of one sequence: a chain or a tree of n nodes below its last token.

    Node 0 is the last emitted token, which is not in the cache yet. Node i goes to slot
    `length + i`, at position `length + depth(i)`.

    tokens: the tokens of nodes 1..n (n may be 0: the step is then a plain one).
    parents: parents[i-1] < i is the parent node of node i; a chain is [0, 1, 2, …].
    hidden: [n+1, d], the target model's residual entering layer `start` for nodes 0..n, whose K/V
        of the layers below `start` the drafter has written; or None: the step embeds and runs these
        layers itself.
    probs: [n, V], the distribution each node's token was drawn from, when tokens were *drawn* (a
        chain) with numbers that are not `Sampler.noise`; None otherwise (argmax, look-up, a tree's
        top-k, `Sampler.choose`). Both are verified losslessly. A token drawn from `probs`
        must be proposed whatever it is: to stop drafting, look at the distribution, never at the
        token drawn (a token withheld because it was unlikely would leave the others
        over-represented).
    trusted: nodes that are emitted where they are reached, whatever the target model says of them
        (dynamic mode: lossy). Each is its parent's only child. When sampling, trust is decided
        before the token is drawn, as above.
    copied: the nodes that were copied from the text, by number (for whoever watches the steps).
    """

    tokens: list[int]
    parents: list[int]
    hidden: Tensor | None = None
    probs: Tensor | None = None
    trusted: frozenset[int] = frozenset()
    copied: range = range(0)

    @classmethod
    def chain(
        cls, tokens: list[int], hidden: Tensor | None = None, probs: Tensor | None = None
    ) -> Draft:
        """A draft whose every node continues the one before."""
        return cls(tokens, list(range(len(tokens))), hidden, probs)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node continues the one before."""
        return self.parents == list(range(len(self.tokens)))

    @cached_property
    def depths(self) -> list[int]:
        """The depth of nodes 0..n: [n+1], the last token's is 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def child(self, node: int, token: int) -> int | None:
        """The node below `node` that has this token, the first of several; None: there is none."""
        if self.is_chain:
            return node + 1 if self.tokens[node : node + 1] == [token] else None
        return self._children.get((node, token))

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        children: dict[tuple[int, int], int] = {}
        for node, edge in enumerate(zip(self.parents, self.tokens, strict=True), start=1):
            children.setdefault(edge, node)
        return children

    def trusted_child(self, node: int) -> int | None:
        """The trusted node below `node`; None: what follows it is verified."""
        return self._trusted_children.get(node)

    @cached_property
    def _trusted_children(self) -> dict[int, int]:
        return {self.parents[node - 1]: node for node in self.trusted}

    def path_tokens(self) -> list[list[int]]:
        """For nodes 0..n the drafted tokens from node 1 on the path down to the node itself."""
        paths: list[list[int]] = [[]]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append([*paths[parent], token])
        return paths

    def cut(self, depth: int, nodes: int) -> Draft:
        """This draft up to its first node deeper than `depth`, and at most `nodes` nodes. Keeps
        node numbers.
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
            None if self.probs is None else self.probs[:count],
            frozenset(node for node in self.trusted if node <= count),
            self.copied,
        )

    def rows(self, seq: int, length: int) -> Rows:
        """The rows of nodes 0..n in a sequence of `length` committed tokens. Raises ValueError as
        `check`.
        """
        self.check()
        if self.is_chain:
            return Rows.causal(seq, length, len(self.tokens) + 1)
        return Rows.draft_tree(seq, length, self.parents)

    def check(self) -> None:
        """Raise ValueError when the draft breaks the contract (a drafter's defect, not a
        user's).
        """
        n = len(self.tokens)
        if len(self.parents) != n or any(not 0 <= p <= i for i, p in enumerate(self.parents)):
            raise ValueError("every node of a draft needs a parent that comes before it")
        if not self.is_chain and n > MAX_TREE_NODES:
            raise ValueError(f"a tree draft has {n} nodes; the maximum is {MAX_TREE_NODES}")
        if self.hidden is not None and self.hidden.shape[0] != n + 1:
            raise ValueError(
                f"a draft of {n} nodes needs {n + 1} rows of hidden, got {self.hidden.shape[0]}"
            )
        if self.probs is not None and self.probs.shape[0] != n:
            raise ValueError(
                f"a draft of {n} nodes needs {n} rows of probs, got {self.probs.shape[0]}"
            )
        for node in self.trusted:
            if not 1 <= node <= n or self.parents.count(self.parents[node - 1]) > 1:
                raise ValueError(f"trusted node {node} must be its parent's only child")


@dataclass
class Verified:
    """What the target model said of a draft of n nodes.

    path: the accepted nodes, 0 (the last token) first.
    tokens: [n+1], of nodes 0..n.
    hidden: [n+1, d], the final residual h_L of every node, rejected ones included.
    taps: for each layer of `Drafter.taps` the residual entering it, [n+1, d].
    top: [n+1][k], the target's k likeliest tokens after each node (by its own logits, before any
        sampling settings), the likeliest first; None unless `Drafter.top` asks for them.
    ahead: of nodes 1 … n the first that steps ahead had emitted (`Drafter.settle`).
    """

    path: list[int]
    tokens: list[int]
    hidden: Tensor
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    top: list[list[int]] | None = None
    ahead: int = 0

    def of_path(self, states: Tensor) -> Tensor:
        """The accepted nodes' rows of states [n+1, d] → [len(path), d]; a view where they are
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
class FusedStep:
    """A finished step of one sequence. tokens: those it emits, the bonus last. drafted:
    nodes of its draft;
    levels: their greatest depth. trusted: the places in `tokens` of those that were not verified.
    draft_seconds: what making the draft took. doubted: rows that narrow weights were not sure of.
    """

    tokens: list[int]
    drafted: int
    levels: int
    trusted: frozenset[int] = frozenset()
    doubted: int = 0
    draft_seconds: float = field(default=0.0, compare=False)


class Drafter(ABC):
    """Proposes tokens that the target model then verifies.

    start: verification runs layers [start, L) on `Draft.hidden`; 0 for drafts from outside the
    model.
    max_nodes: no draft has more nodes; the loop reserves that many cache slots before each `draft`.
    lossless: whether exact acceptance makes the output the base model's (it does for every drafter
        that keeps this contract).
    repeats_text: whether a seed's sampled text is then that of plain decoding; if not, it is
        another one of the same distribution (drafts with `Draft.probs`).
    taps: layers, `start` at least, whose entering residuals `prefill` and `accept` are given.
    top: of how many of the target's likeliest tokens after each node `accept` is told.
    adapts: whether it decides by itself when not to draft; else `SpeculativeStep.adapt` can.
    expected: acceptance of its drafts by depth as measured before, the first guess of what they
        bring; empty: unknown.
    longest: the longest match that `matched` tells; 0: it tells none.
    looks_up: whether it may draft the text's continuation instead, which takes no time to make.
    rests: whether one that adapts may leave a step without a draft; `SpeculativeStep.adapt` says.
    ends: tokens that end a sequence: drafts and steps after one are of no use.
    worth: [max_nodes], the least chance of being accepted with which the n-th node of the next
        draft pays, not falling; None: unknown. Told before `draft` to one that does not adapt
        itself.
    ahead: whether the next draft is verified by a narrow copy of the model, where a row costs more.
        Told before `draft`.
    in_stages: whether a fused step of the generation under way is several of its own, which decide
        by themselves what to draft (methods/common/stages.py).
    drafting_seconds: as `Step.drafting_seconds`, of its fused steps.
    prompt_decoder: as `Step.prompt_decoder`.
    leaves_exact: whether the K/V that its fused steps leave are those of a prefill by what reads
        the prompts.
    refused: of one that trusts tokens by a score, the highest of this generation that was too low,
        −inf where none was: with a threshold above it, the text is the same. None: unknown.
    """

    start: int = 0
    max_nodes: int = MAX_TREE_NODES
    lossless: bool = True
    repeats_text: bool = True
    taps: tuple[int, ...] = ()
    top: int = 0
    adapts: bool = False
    expected: Sequence[float] = ()
    longest: int = 0
    looks_up: bool = False
    rests: bool = True
    ends: Sequence[int] = ()
    worth: np.ndarray | None = None
    ahead: bool = False
    in_stages: bool = False
    drafting_seconds: float = 0.0
    prompt_decoder: Decoder | None = None
    leaves_exact: bool = True
    refused: float | None = None

    _costs: CostModel | None = None

    def costs(self, decoder: Decoder) -> CostModel:
        """What a draft step, a verification and a plain step take on this machine; measured once
        (under half a second).

        Not during a generation: the trial step may use the drafter's state.
        """
        if self._costs is None:
            self._costs = measure_costs(decoder, self.start, self.trial_step())
        return self._costs

    def trial_step(self) -> Callable[[], object] | None:
        """What drafts one more token for one sequence, to be timed; None: what `measure_costs`
        assumes.
        """
        return None

    def prepare(self) -> None:  # noqa: B027 - most have nothing to put off
        """Makes now what would else be made once it pays."""

    def begin(self, cache: KVCache, sampler: Sampler) -> None:  # noqa: B027 - a drafter without state needs none
        """A generation begins on an empty `cache`. Forget the one before, which may have been
        interrupted.
        """

    def usable(self, cache: KVCache, length: int) -> int:
        """How many of the first `length` tokens of `cache`'s only sequence this drafter can go on
        from after `resume`.

        The cache is as a finished generation left it. The default, 0, makes every generation begin
        anew.
        """
        return 0

    def resume(self, cache: KVCache, sampler: Sampler) -> None:
        """Instead of `begin`, when the last generation goes on: `cache` is its cache, cut to fewer
        tokens than `usable` allowed. The token after these is read again, `prefill` then gets its
        and the later ones' h_L.
        """
        self.begin(cache, sampler)

    def prefill(  # noqa: B027 - optional
        self,
        seqs: Sequence[int],
        prompts: Sequence[Sequence[int]],
        hidden_final: Sequence[Tensor],
        taps: Sequence[Mapping[int, Tensor]],
    ) -> None:
        """The target model has read the prompts. hidden_final[i]: h_L of every prompt token of
        seqs[i], [T_i, d]; after `resume` of those that were read. taps[i]: the same tokens'
        residuals entering each layer of `taps`.
        """

    @abstractmethod
    def draft(
        self,
        seqs: Sequence[int],
        last_tokens: Sequence[int],
        limits: Sequence[int],
        sampler: Sampler,
    ) -> list[Draft]:
        """One draft for each of the unfinished sequences `seqs`.

        last_tokens[i]: the last emitted token of seqs[i], to be written at slot
        `cache.lengths[seqs[i]]`. limits[i] ≥ 0: the deepest level of use to seqs[i] (tokens it may
        still emit, less the one that verification adds). The step drops deeper nodes. Where all
        are 0 no draft is of use, and making one is to be left out.
        """

    def behind(self, seqs: Sequence[int]) -> int:
        """Rows that the next draft has to catch up on because there was none lately."""
        return 0

    def matched(self, seqs: Sequence[int]) -> list[int]:
        """Of drafts that continue the text: how long a match the next one of each sequence would
        follow, `longest` at most. What such drafts bring is counted by it.
        """
        return [0] * len(seqs)

    def continuation(self, seq: int, most: int) -> tuple[list[int], int]:
        """Of drafts that continue the text: so many tokens at most that sequence `seq` had after
        those it ends in, and how many of these matched; 0: none, or not in this text.
        """
        return [], 0

    def fused_steps(
        self, seqs: Sequence[int], last_tokens: Sequence[int], limits: Sequence[int]
    ) -> list[list[FusedStep]] | None:
        """A whole step of each of the sequences `seqs`, or several, where the drafter can run them
        at once; None: it cannot, and the step calls `draft`, verifies and calls `accept`. Not asked
        for where there is a repetition penalty.

        Same tokens as that way. The K/V of a sequence's last token and of the accepted ones end up
        in the slots after its `cache.lengths`, uncommitted. Once a sequence has had a fused step,
        all its later ones are.
        """
        return None

    def accept(self, seq: int, verified: Verified) -> None:  # noqa: B027 - optional
        """Sequence `seq` goes on with the nodes of `verified.path`. The cache is committed already;
        `sampler.tokens[seq]` ends in the next step's last token. Not called for a sequence that has
        just finished.
        """

    def settle(self, seq: int, verified: Verified) -> None:
        """Sequence `seq` goes on with the nodes of `verified.path` after all. The first
        `verified.ahead` nodes are the tokens that its steps since the last `settle` emitted, as a
        chain; `accept` was told of these steps when a narrow copy of the model had verified them.
        Behind them is what `draft` proposed after the last one. verified.top: None. Otherwise as
        `accept`, which it is by default.
        """
        self.accept(seq, verified)
