"""What each step of a draft branch drafts with: the branch, tokens of the text, or nothing."""

from __future__ import annotations

from collections.abc import Sequence

from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.budget import BudgetPolicy, Plan
from multirate.decoding.speculate.drafter import DraftRequest
from multirate.decoding.speculate.step_costs import StepCosts
from multirate.decoding.speculate.text_source import TextSource
from multirate.methods._shared.branch_config import BranchDecodeConfig
from multirate.methods._shared.draft_estimates import (
    LOSSY_COSTS,
    NO_MATCH,
    DraftEstimates,
    Match,
)
from multirate.methods._shared.draft_tree import DraftTree
from multirate.methods._shared.lookup import Lookup
from multirate.runtime.fused import FusedSequences, FusedStep


class DraftChoice:
    """Chooses by estimates, and learns from what came true.

    nodes: maximum number in a draft. fused: the sequences whose text the decoder looks up.
    drafted: sequences that the branch drafts for in this step.
    """

    def __init__(
        self,
        config: BranchDecodeConfig,
        lookup: Lookup,
        nodes: int,
        lossless: bool,
        fused: FusedSequences | None,
    ) -> None:
        self._config, self._lookup, self._nodes = config, lookup, nodes
        self._lossless, self._fused = lossless, fused
        self._prices = config.draft_threshold is None or config.verify_threshold is None
        self._lossy_costs = None if lossless else LOSSY_COSTS
        self.shared = self._new_estimates(self._lossy_costs)
        self._own: dict[int, DraftEstimates] = {}  # by sequence
        self.drafted: set[int] = set()
        self._unlooked = False  # the policy goes without drafts in this step
        self.matches: dict[int, Match] = {}
        self._texts: dict[int, TextSource] = {}

    def begin(self, sampler: Sampler) -> None:
        """A generation begins."""
        self._sampler = sampler
        self._own, self.drafted, self.matches, self._texts = {}, set(), {}, {}

    def pause(self) -> None:
        """The time until the next step does not count."""
        if self.shared.policy is not None:
            self.shared.policy.pause()

    def leave(self, seq: int) -> None:
        """Forgets a sequence."""
        self.drafted.discard(seq)
        self._own.pop(seq, None)
        self.matches.pop(seq, None)
        self._texts.pop(seq, None)

    def interrupted(self) -> None:
        """As `BudgetPolicy.interrupted`."""
        if self.shared.policy is not None:
            self.shared.policy.interrupted()

    def go_by(self, costs: StepCosts, expected: Sequence[float]) -> None:
        """From now on drafts grow by these measured costs."""
        rates = self.shared.continuations
        self.shared.go_by(BudgetPolicy(costs, self._config.nodes, rates, expected))

    def _new_estimates(self, costs: StepCosts | None) -> DraftEstimates:
        """costs: fixed costs for thresholds that the settings leave open; None: measured later."""
        made = DraftEstimates.of(self._config, self._nodes, self._lookup)
        if costs is not None and self._prices:
            rates = made.continuations
            made.go_by(BudgetPolicy(costs, self._nodes, rates, timed=False))
        return made

    def estimates(self, seq: int) -> DraftEstimates:
        """Lossless sequences share one set. A lossy one has its own, so that its text depends
        neither on its batch nor on earlier generations.
        """
        if self._lossless:
            return self.shared
        if seq not in self._own:
            self._own[seq] = self._new_estimates(self._lossy_costs)
        return self._own[seq]

    def groups(self, seqs: Sequence[int]) -> list[list[int]]:
        """Indices into `seqs`, one list for each set of estimates."""
        every = list(range(len(seqs)))
        return [every] if self._lossless else [[i] for i in every]

    def plan(self, request: DraftRequest, behind: int) -> Plan:
        """Starts a step of sequences with the same estimates: what it drafts with, and the
        thresholds. behind: rows that the branch would have to catch up on first.
        """
        seqs, limits = request.seqs, request.limits
        self._unlooked = False
        known = self.estimates(seqs[0])
        known.price(self._config, len(seqs), request.refilled)
        if known.policy is None:
            drafts = any(limits)
            plan = Plan(True) if drafts else Plan(False, (0,) * len(seqs))
        elif request.rests and not request.forced and known.policy.skips_drafts():
            self.drafted -= set(seqs)
            self._unlooked = True
            return Plan(False, (0,) * len(seqs))
        else:
            most = [min(self._config.nodes, limit) for limit in limits]
            for seq in seqs:
                self.matches[seq] = self._look_up(seq)
            found = [
                (self.matches[seq].matched, count) for seq, count in zip(seqs, most, strict=True)
            ]
            free = any(seq not in request.forced for seq in seqs)
            plan = known.policy.choose(found, max(limits), behind, request.rests, own=free)
        self.drafted = self.drafted | set(seqs) if plan.own else self.drafted - set(seqs)
        for seq in request.forced.keys() & set(seqs):
            self.matches[seq] = Match(list(request.forced[seq]), 0)
            self.drafted.discard(seq)
        return plan

    def _look_up(self, seq: int) -> Match:
        if not self._lookup.longest:
            return NO_MATCH
        nodes = self._config.nodes
        if self._fused is not None and seq in self._fused:
            return Match(*self._fused.look_up(seq, nodes))
        return Match(*self.text_of(seq).look_up(self._sampler.tokens[seq], nodes))

    def text_of(self, seq: int) -> TextSource:
        """What the sequence's text is looked up in."""
        if seq not in self._texts:
            self._texts[seq] = self._lookup.source()
        return self._texts[seq]

    def match(self, seq: int) -> Match:
        """The match in the text that was found when this step began."""
        return self.matches.get(seq, NO_MATCH)

    def learn(
        self,
        seq: int,
        emitted: Sequence[int],
        tree: DraftTree,
        path: Sequence[int],
        nodes: int,
        draft_seconds: float | None = None,
    ) -> None:
        """What came true of the sequence's step: see DraftEstimates."""
        if self._unlooked:
            return
        self.estimates(seq).observe(
            emitted,
            tree,
            path,
            nodes,
            match=self.match(seq),
            own=seq in self.drafted,
            draft_seconds=draft_seconds,
        )

    def learn_fused(self, seq: int, done: FusedStep) -> None:
        """The same of a fused step."""
        if self._unlooked or (self.estimates(seq).policy is None and not self._lookup.longest):
            return
        if not done.drafted and seq not in self.drafted:  # a plain step
            self.estimates(seq).observe_plain(done.tokens, self.match(seq), done.draft_seconds)
            return
        assert self._fused is not None
        nodes = self._fused.nodes(seq)
        tree = DraftTree(0, drafted=nodes.drafted, continued=nodes.continued)
        tree.matched, tree.best = nodes.matched, nodes.best
        tree.tokens, tree.parents = nodes.tokens, nodes.parents
        tree.confidence, tree.unverified = nodes.confidence, nodes.unverified
        path, depth = [0], tree.depth
        edges = zip(tree.parents, tree.tokens, strict=True)
        for node, (parent, token) in enumerate(edges, start=1):
            depth.append(depth[parent] + 1)
            if parent == path[-1] and token == done.tokens[len(path) - 1]:
                path.append(node)
        self.learn(seq, done.tokens, tree, path, done.drafted, done.draft_seconds)
