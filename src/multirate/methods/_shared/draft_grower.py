"""Grows the drafts of a trained branch level by level, on any decoder, with one pass per level for
all sequences. The native kernel does the same in one call (fused_steps.py, csrc/draft.c).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.drafter import Draft
from multirate.decoding.speculate.text_source import TextSource
from multirate.methods._shared.branch_config import BranchDecodeConfig
from multirate.methods._shared.branch_reading import DraftInput
from multirate.methods._shared.draft_estimates import DraftEstimates
from multirate.methods._shared.draft_runner import DraftRunner
from multirate.methods._shared.draft_tree import DraftTree
from multirate.runtime.decoder import argmax_rows
from multirate.runtime.draft_branch import Likeliest
from multirate.runtime.fused import Unverified
from multirate.runtime.rows import Rows


@dataclass
class GrowingDraft:
    """The draft of one sequence while it grows below `last_token`, which comes after `length`
    committed tokens and the pending ones.

    text: for lookup; None: no lookup.
    hidden: target residuals of the nodes that have run, [1, d] each, from node 0 on.
    outputs: node → the branch's output p, [1, d].
    frontier: nodes to draft from next.
    """

    seq: int
    length: int
    last_token: int
    pending: DraftInput
    estimates: DraftEstimates
    text: TextSource | None
    tree: DraftTree
    hidden: list[Tensor] = field(default_factory=list)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    frontier: list[int] = field(default_factory=lambda: [0])


class DraftGrower:
    """Grows drafts with ``runner``. max_nodes: of a draft, unverified tokens included. carry:
    whether the branch reads a carried residual.

    highest_rejected: the highest score that was too low to be accepted unverified; −inf: none was.
    """

    def __init__(
        self,
        runner: DraftRunner,
        config: BranchDecodeConfig,
        *,
        max_nodes: int,
        carry: bool,
        unverified: Unverified | None,
    ) -> None:
        self._runner, self._config, self._max_nodes = runner, config, max_nodes
        self._carry, self._unverified = carry, unverified
        self.highest_rejected = -np.inf
        # how many of the frontier's likeliest tokens a level is to tell at once, and what it told
        self._asked = 0
        self._told: Likeliest | None = None

    def grow(
        self, growing: Sequence[GrowingDraft], sampler: Sampler, candidates: int
    ) -> list[Draft]:
        """The drafts' trees, and what verification needs of them. What waits is read. candidates:
        tokens looked at below a node.
        """
        seqs = [one.seq for one in growing]
        in_trees = not sampler.uses_context(seqs)
        self._asked = candidates if in_trees and sampler.greedy(seqs) and len(growing) == 1 else 0
        self._first_pass(growing)
        live = [one for one in growing if one.tree.depth_limit > 0]
        while live:
            if in_trees:
                self._grow_best(live, sampler, candidates)
            else:
                self._grow_chains(live, sampler)
            live = [one for one in live if one.frontier]
            if live:
                self._next_pass(live)
        return self._finish(growing, in_trees)

    # -- the passes --------------------------------------------------------------------------------

    def _first_pass(self, growing: Sequence[GrowingDraft]) -> None:
        """Waiting rows of all sequences, and then their last tokens."""
        parts, ids, carried = [], [], []
        for one in growing:
            pending = one.pending
            pending.keep_newest(self._runner.window)
            if pending.ids:
                count = len(pending.ids)
                parts.append(Rows.causal(one.seq, one.length - count, count))
                ids += pending.ids
                carried += pending.carried
        for one in growing:
            parts.append(Rows.causal(one.seq, one.length, 1))
            ids.append(one.last_token)
            carried.append(one.pending.last[None])
        h_gate, p = self._run(
            ids, Rows.concat(parts), torch.cat(carried) if self._carry else None, len(growing)
        )
        for one, hidden, output in zip(growing, h_gate.split(1), p.split(1), strict=True):
            one.pending.keep(0)
            one.hidden.append(hidden)
            one.outputs[0] = output

    def _next_pass(self, live: Sequence[GrowingDraft]) -> None:
        """Runs the frontier nodes."""
        nodes = [(one, node) for one in live for node in one.frontier]
        carried = None
        if self._carry:
            carried = torch.cat([one.outputs[one.tree.parents[node - 1]] for one, node in nodes])
        ids = [one.tree.tokens[node - 1] for one, node in nodes]
        h_gate, p = self._run(ids, _rows_of(nodes), carried, len(nodes))
        for (one, node), hidden, output in zip(nodes, h_gate.split(1), p.split(1), strict=True):
            one.hidden.append(hidden)
            one.outputs[node] = output

    def _run(
        self, ids: list[int], rows: Rows, carried: Tensor | None, fresh: int
    ) -> tuple[Tensor, Tensor]:
        """A level: of its last `fresh` rows, which is the frontier, residuals and outputs."""
        count, sharpness = self._asked, self._config.SHARPNESS
        hidden, p, self._told = self._runner.level(ids, rows, carried, fresh, count, sharpness)
        return hidden, p

    # -- growing -----------------------------------------------------------------------------------

    def _grow_best(self, live: Sequence[GrowingDraft], sampler: Sampler, candidates: int) -> None:
        """Trees of the branch's likeliest tokens, when sampling by logits that have the noise of
        the model's own.
        """
        config = self._config
        nodes = [(one, node) for one in live for node in one.frontier]
        noise = sampler.noises(
            [one.seq for one, _ in nodes], [one.tree.depth[node] for one, node in nodes]
        )
        p = _frontier_outputs(live)
        ids, best = self._told or self._runner.top(p, candidates, config.SHARPNESS, noise)
        unverified = self._passes(p, lambda: [row[0] for row in best])
        at = 0
        for one in live:
            count = len(one.frontier)
            followed = agrees = False
            if count == 1 and one.tree.is_chain:
                text = sampler.tokens[one.seq]
                followed, agrees = self._continue(
                    one, text, ids[at][0], best[at][0], unverified[at]
                )
            one.frontier = one.tree.grow(
                one.frontier,
                ids[at : at + count],
                best[at : at + count],
                0 if followed else config.width,
                one.estimates.draft_threshold,
                one.estimates.verify_threshold,
                first=int(agrees),
                unverified=unverified[at : at + count],
            )
            at += count

    def _continue(
        self, one: GrowingDraft, text: Sequence[int], best: int, own: float, unverified: bool
    ) -> tuple[bool, bool]:
        """Lets the tree, a chain so far, end in what the text said after the same tokens, where
        that is worth it. → whether it does, and with the branch's best token.
        """
        tree, known = one.tree, one.estimates
        most = min(tree.deepest, tree.budget(self._max_nodes)) - len(tree.tokens)
        if one.text is None or most <= 0:
            return False, False
        continuation, matched = one.text.look_up(text, most, tree.tokens)
        if not matched:
            return False, False
        agrees = continuation[0] == best
        length = tree.continuation_length(
            most,
            tree.worth(own),
            matched,
            known.continuations,
            known.draft_threshold,
            known.verify_threshold,
            agrees,
            unverified,
        )
        if length:
            tree.continue_with(continuation[:length], matched, unverified)
        return length > 0, length > 0 and agrees

    def _grow_chains(self, live: Sequence[GrowingDraft], sampler: Sampler) -> None:
        """Chains, by the settings' whole pipeline: for a repetition penalty."""
        p = _frontier_outputs(live)
        logits = self._runner.logits(p)
        perturbed = sampler.perturbed(
            logits, [one.seq for one in live], [one.tree.tokens for one in live]
        )
        q, tokens = torch.softmax(perturbed, dim=-1), argmax_rows(perturbed)
        # of the logits: the distribution of greedy tokens under a penalty is sure of each
        unverified = self._passes(
            p, lambda: torch.softmax(self._config.SHARPNESS * logits, -1).amax(-1).tolist()
        )
        sure = q.amax(-1).tolist()
        for k, one in enumerate(live):
            tree, node = one.tree, one.frontier[0]
            if self._ends(one, node, unverified[k]):
                one.frontier = []
                continue
            chance = tree.path_probability[node]
            if not unverified[k]:
                chance *= tree.worth(sure[k])
            one.frontier = [tree.add(node, tokens[k], chance, sure[k], unverified[k])]
            tree.drafted += 1

    def _ends(self, one: GrowingDraft, node: int, unverified: bool) -> bool:
        """Whether a chain gets no token below `node`. unverified: whether it would be."""
        tree = one.tree
        if (
            tree.levels[node] + (not unverified) > tree.depth_limit
            or tree.depth[node] >= tree.deepest
            or len(tree.tokens) >= tree.budget(self._max_nodes)
        ):
            return True
        if not node:
            return False
        unlikely = tree.path_probability[node] < one.estimates.draft_threshold[node - 1]
        return bool(unlikely or tree.confidence[node - 1] < tree.min_probability)

    def _passes(self, p: Tensor, confidence: Callable[[], list[float]]) -> list[bool]:
        """For each row of p [n, d] whether its token is emitted unverified. confidence: the
        sharpened top-1 probabilities.
        """
        unverified = self._unverified
        if unverified is None:
            return [False] * len(p)
        scores = self._runner.agreement(p) if unverified.by_agreement else confidence()
        low = [score for score in scores if score < unverified.threshold]
        self.highest_rejected = max([self.highest_rejected, *low])
        return [score >= unverified.threshold for score in scores]

    def _finish(self, growing: Sequence[GrowingDraft], in_trees: bool) -> list[Draft]:
        """Adds the leaves; their slow rows (and those of nodes not run yet) go through the layers
        below the gate.
        """
        missing: list[tuple[GrowingDraft, int]] = []
        whole = not self._runner.keys_only  # else the step runs all rows through the layers below
        for one in growing:
            if in_trees:
                one.tree.finish(one.estimates.verify_threshold)
            if whole:
                nodes = range(len(one.hidden), len(one.tree.tokens) + 1)
                missing += [(one, node) for node in nodes]
        if missing:
            tokens = [one.tree.tokens[node - 1] for one, node in missing]
            h_gate = self._runner.slow(tokens, _rows_of(missing))
            for (one, _), hidden in zip(missing, h_gate.split(1), strict=True):
                one.hidden.append(hidden)
        return [
            Draft(
                one.tree.tokens,
                one.tree.parents,
                torch.cat(one.hidden) if whole else None,
                frozenset(one.tree.unverified),
                one.tree.copied,
            )
            for one in growing
        ]


def _rows_of(nodes: Sequence[tuple[GrowingDraft, int]]) -> Rows:
    length = np.array([one.length for one, _ in nodes], dtype=np.int32)
    return Rows(
        np.array([one.seq for one, _ in nodes], dtype=np.int32),
        length + np.array([node for _, node in nodes], dtype=np.int32),
        length + np.array([one.tree.depth[node] for one, node in nodes], dtype=np.int32),
        length + np.int32(1),
        np.array([one.tree.bits[node] for one, node in nodes], dtype=np.int64),
    )


def _frontier_outputs(live: Sequence[GrowingDraft]) -> Tensor:
    """p of all frontier nodes, [n, d]."""
    return torch.cat([one.outputs[node] for one in live for node in one.frontier])
