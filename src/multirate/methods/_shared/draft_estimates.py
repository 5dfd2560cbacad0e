"""Estimates that guide a trained draft branch, learned while decoding: how often text lookup and
the branch's own tokens are accepted, and the minimum path probability of a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from multirate.decoding.speculate.acceptance_statistics import Calibration, ContinuationRates
from multirate.decoding.speculate.budget import BudgetPolicy
from multirate.decoding.speculate.step_costs import StepCosts
from multirate.methods._shared.branch_config import BranchDecodeConfig
from multirate.methods._shared.draft_tree import DraftTree
from multirate.methods._shared.lookup import Lookup

LOSSY_COSTS = StepCosts(
    plain_step=1.0,
    verify={1: 0.97, 2: 0.99, 4: 1.03, 8: 1.13, 12: 1.28, 16: 1.56, 24: 2.1, 32: 2.9, 60: 5.2},
    draft_step=0.06,
)
"""Draft costs in plain steps, from SmolLM2-135M on an AVX-512 processor
(lab/notes/weight-formats.md). Fixed instead of measured, because a lossy text must not depend on
timing.
"""
# Where only one of the two thresholds is set.
_FIXED_DRAFT_THRESHOLD, _FIXED_VERIFY_THRESHOLD = 0.3, 0.1


@dataclass
class Match:
    """What the text had after the tokens it ends in, when a step began."""

    continuation: list[int]
    matched: int


NO_MATCH = Match([], 0)


@dataclass
class DraftEstimates:
    """draft_threshold, verify_threshold: [nodes], of the current step.
    policy: sets thresholds that the settings leave open, and chooses what to draft with; None:
        both are set, or costs are still to be measured.
    calibration: maps the branch's confidence to acceptance; None as for the policy.
    """

    continuations: ContinuationRates
    draft_threshold: np.ndarray
    verify_threshold: np.ndarray
    policy: BudgetPolicy | None = None
    calibration: Calibration | None = None

    @staticmethod
    def of(config: BranchDecodeConfig, nodes: int, lookup: Lookup) -> DraftEstimates:
        """Of a branch that has drafted nothing yet, of up to `nodes` nodes."""
        draft_threshold, verify_threshold = (
            np.full(nodes, fixed if chosen is None else chosen, np.float64)
            for chosen, fixed in (
                (config.draft_threshold, _FIXED_DRAFT_THRESHOLD),
                (config.verify_threshold, _FIXED_VERIFY_THRESHOLD),
            )
        )
        rates = ContinuationRates(lookup.longest, lookup.told)
        return DraftEstimates(rates, draft_threshold, verify_threshold)

    def go_by(self, policy: BudgetPolicy) -> None:
        """From now on it sets the thresholds that the settings leave open."""
        self.policy, self.calibration = policy, Calibration()

    def price(self, config: BranchDecodeConfig, sequences: int, refilled: bool) -> None:
        """Thresholds of the next step, from the costs where the settings leave them open."""
        if self.policy is None:
            return
        draft_threshold, verify_threshold = self.policy.thresholds(sequences, refilled)
        if config.draft_threshold is None:
            self.draft_threshold = draft_threshold
        if config.verify_threshold is None:
            self.verify_threshold = verify_threshold

    def observe(
        self,
        emitted: Sequence[int],
        tree: DraftTree,
        path: Sequence[int],
        nodes: int,
        *,
        match: Match,
        own: bool,
        draft_seconds: float | None = None,
    ) -> None:
        """What came true of a step's draft. tree: with the nodes that the branch or the text gave,
        where these are known; path: the accepted ones; nodes: how many there were. match: of the
        text, before the step; own: whether the branch drafted. draft_seconds: what making it
        took; None: unknown.
        """
        if own and self.continuations.longest and tree.drafted + 1 not in tree.unverified:
            # else the continuation begins with an unverified token, which nobody has judged
            self.continuations.observe(tree.origin, *tree.accepted(path))
        if self.policy is None:
            return
        levels = max(tree.depth[: tree.drafted + 1]) + 1 if own else 0
        self.policy.emitted(len(emitted), levels, nodes, match.matched, draft_seconds, own)
        if match.matched:
            best = tree.best and tree.best[0]
            self.continuations.observe_text(match.continuation, match.matched, emitted, best)
        if own:
            self._calibrate(emitted[0], tree, set(path))

    def observe_plain(
        self, emitted: Sequence[int], match: Match, draft_seconds: float | None = None
    ) -> None:
        """As `observe`, of a step without a draft."""
        if self.policy is None:
            return
        self.policy.emitted(len(emitted), 0, 0, match.matched, draft_seconds, own=False)
        if match.matched:
            self.continuations.observe_text(match.continuation, match.matched, emitted)

    def _calibrate(self, first: int, tree: DraftTree, accepted: set[int]) -> None:
        """Whether the branch was right in what verification has judged: its best token, which is
        known in any case, and the children of accepted nodes.
        """
        if self.calibration is None:
            return
        best = tree.best
        if best is not None and not tree.best_is_unverified:
            self.calibration.observe_one(best[1], best[0] == first)
        for node, (parent, token, sure) in enumerate(
            zip(tree.parents, tree.tokens, tree.confidence, strict=True), start=1
        ):
            told = not parent and best is not None and token == best[0]
            judged = sure >= 0 and parent in accepted and node not in tree.unverified
            if judged and not told:
                self.calibration.observe_one(sure, node in accepted)
