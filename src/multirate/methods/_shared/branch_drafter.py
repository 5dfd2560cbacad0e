"""Drafts of a trained draft branch: trees of its likeliest tokens, continued with tokens copied
from the text. Verification makes them lossless.

The first level of a draft runs the last token and the tokens accepted since the last draft, with
residuals carried from the model. The accepted tokens only fill the K/V of the branch's own layer.
Later levels feed the branch its own output. If the branch starts in the model's first layers, the
model's own rows of all nodes go through these layers in the same calls, and verification starts
after them (docs/methods/m2r2.md). The runner knows the kind of branch (draft_runner.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.acceptance import choose_path
from multirate.decoding.speculate.budget import Plan
from multirate.decoding.speculate.costs import CostModel
from multirate.decoding.speculate.drafter import Draft, Drafter, DraftRequest, Traits, Verified
from multirate.methods._shared.branch_config import BranchDecodeConfig
from multirate.methods._shared.branch_reading import BranchReading
from multirate.methods._shared.draft_choice import DraftChoice
from multirate.methods._shared.draft_grower import DraftGrower, GrowingDraft
from multirate.methods._shared.draft_runner import DraftRunner
from multirate.methods._shared.draft_tree import DraftTree
from multirate.methods._shared.lookup import Lookup
from multirate.runtime.decoder import Decoder
from multirate.runtime.fused import (
    DraftShape,
    FusedSequences,
    FusedStep,
    Growth,
    Unverified,
    copying,
)
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import Rows

_MOST_NODES = 59  # of a draft with unverified tokens: the kernel's 60 rows but the last token's


class BranchDrafter(Drafter):
    """Drafts with a branch on any decoder; on the native one steps are fused.

    start: how many of the model's first layers the runner runs for drafted rows. backfill: whether
    the branch has K/V of its own. carry: whether it reads a carried residual. min_probability: a
    node whose own is lower is not drafted from.
    """

    def __init__(
        self,
        decoder: Decoder,
        runner: DraftRunner,
        config: BranchDecodeConfig,
        *,
        start: int = 0,
        backfill: bool = True,
        carry: bool = True,
        unverified: Unverified | None = None,
        min_probability: float = 0.0,
    ) -> None:
        self.decoder, self.runner, self.config = decoder, runner, config
        self._lookup = Lookup.of(config.texts, decoder) if config.lookup else Lookup(0)
        self._unverified = unverified
        lossless, self._most = unverified is None, config.nodes
        if unverified is not None:
            self._most = max(self._most, min(_MOST_NODES, config.nodes + unverified.nodes))
        prices = config.draft_threshold is None or config.verify_threshold is None
        self.traits = Traits(
            start=start,
            max_nodes=self._most,
            lossless=lossless,
            taps=runner.taps,
            adapts=lossless and prices,
            looks_up=self._lookup.longest > 0,
            joins=True,
        )
        self._expected: tuple[float, ...] = ()
        self._backfill, self._carry, self._min_probability = backfill, carry, min_probability
        self._grower = DraftGrower(
            runner,
            config,
            max_nodes=self._most,
            carry=carry,
            unverified=unverified,
        )
        self._cache: KVCache | None = None
        self._trees: dict[int, DraftTree] = {}  # of the last drafts, by sequence
        self._similar: dict[int, list[int]] = {}
        runner.see(config.window)
        packed = runner.packed
        self._fused = None if packed is None else packed.fused(self._shape(), self._lookup)
        self._reading = BranchReading(runner, self._fused, backfill)
        self._choice = DraftChoice(config, self._lookup, self._most, lossless, self._fused)

    def _shape(self) -> DraftShape:
        config, unverified = self.config, self._unverified
        if unverified is not None:
            unverified = replace(unverified, nodes=self._most - config.nodes)
        return DraftShape(
            config.nodes,
            config.width,
            self._candidates,
            config.SHARPNESS,
            self._min_probability,
            self._backfill,
            unverified,
        )

    def expect(self, rates: Sequence[float]) -> None:
        self._expected = tuple(rates)

    def trial_step(self) -> Callable[[], object]:
        """One level of one node on a cache of its own."""
        self.runner.begin(self.decoder.new_cache(1, 64))
        rows = Rows.causal(0, 40, 1)
        carried = torch.zeros(
            1, self.decoder.info.hidden_size, device=self.decoder.info.device, dtype=torch.float32
        )

        def level() -> object:
            count, given = self._candidates, carried if self._carry else None
            _, p, best = self.runner.level([0], rows, given, 1, count, self.config.SHARPNESS)
            return best or self.runner.top(p, count, self.config.SHARPNESS)

        return level

    def costs(self, decoder: Decoder) -> CostModel:
        if self._costs is None:
            self._costs = super().costs(decoder)
            if self._fused is not None:
                fixed, level = self._fused.draft_costs(self._choice.shared.continuations)
                costs = replace(self._costs.costs, draft_step=level, draft_fixed=fixed)
                self._costs = replace(self._costs, costs=costs)
        return self._costs

    def begin(self, cache: KVCache, sampler: Sampler) -> None:
        if self._choice.shared.policy is None and self.traits.adapts:
            self._choice.go_by(self.costs(self.decoder).costs, self._expected)
        self._choice.pause()
        self.runner.begin(cache)
        self._reading.begin()
        self._enter(cache, sampler)

    def _enter(self, cache: KVCache, sampler: Sampler) -> None:
        self._cache, self._sampler = cache, sampler
        self._trees, self._similar = {}, {}
        self._choice.begin(sampler)
        self._grower.highest_rejected = -np.inf
        if self._fused is not None:
            self._fused.begin(cache, sampler, partial(choose_path, sampler))

    def joined(self, seq: int, similar: Sequence[int]) -> None:
        if similar and self._fused is not None:  # torch's drafts do without
            self._similar[seq] = list(similar)

    def leave(self, seq: int) -> None:
        self._trees.pop(seq, None)
        self._similar.pop(seq, None)
        self._choice.leave(seq)
        self._reading.leave(seq)
        if self._fused is not None:
            self._fused.leave(seq)

    def caches(self) -> list[KVCache]:
        own = self.runner.own_cache
        return [] if own is None else [own]

    def settle(self, seq: int) -> int:
        if not self._backfill:
            return sys.maxsize
        assert self._cache is not None
        return sys.maxsize if self._reading.settle(seq, self._cache.lengths[seq]) else 0

    def interrupted(self) -> None:
        self._choice.interrupted()

    @property
    def highest_rejected(self) -> float | None:
        if self.traits.lossless:
            return None
        fused = -np.inf if self._fused is None else self._fused.highest_rejected
        return max(self._grower.highest_rejected, fused)

    def usable(self, cache: KVCache, length: int) -> int:
        if cache is not self._cache or not self.runner.serves(cache):
            return 0
        return self._reading.usable(length)

    def resume(self, cache: KVCache, sampler: Sampler) -> None:
        self._choice.pause()
        reading = self._reading
        behind = reading.left_behind()  # the decoder's steps forget it
        self._enter(cache, sampler)
        reading.resume(behind, cache.lengths[0])

    def prefill(
        self,
        seqs: Sequence[int],
        prompts: Sequence[Sequence[int]],
        hidden_final: Sequence[Tensor],
        taps: Sequence[Mapping[int, Tensor]],
    ) -> None:
        """The own layer reads what it will see of the prompts only before the first draft."""
        window = self.runner.window
        for seq, prompt, final, inner in zip(seqs, prompts, hidden_final, taps, strict=True):
            unseen = 0 if window is None else max(0, len(final) - window - 1)
            hidden = self.runner.carried(
                final[unseen:], {layer: states[unseen:] for layer, states in inner.items()}
            )
            self._reading.prefill(seq, prompt, hidden, bool(unseen))

    def behind(self, seqs: Sequence[int]) -> int:
        return sum(self._reading.behind(seq) for seq in seqs)

    def accept(self, seq: int, verified: Verified) -> None:
        path, tokens = verified.path, self._sampler.tokens[seq]
        inner = {layer: verified.of_path(states) for layer, states in verified.taps.items()}
        carried = self.runner.carried(verified.accepted, inner)
        tree = self._trees.pop(seq, None)
        if tree is None:
            tree = DraftTree(0)
        self._choice.learn(seq, tokens[-len(path) :], tree, path, len(verified.hidden) - 1)
        self._reading.accepted(seq, tokens, carried, seq in self._choice.drafted)

    def fused_steps(self, request: DraftRequest) -> list[FusedStep] | None:
        fused, seqs = self._fused, request.seqs
        if fused is None:
            return None
        assert self._cache is not None
        sampler = self._sampler
        if self._unverified is not None and not (sampler.greedy(seqs) and sampler.by_argmax(seqs)):
            return None  # sampling: the kernel accepts nothing unverified
        for seq, last_token in zip(seqs, request.last_tokens, strict=True):
            if seq not in fused:
                self._enter_fused(fused, seq, last_token)
        growths: dict[int, Growth] = {}
        for part, plan in self._plans(request):
            drafting: dict[tuple[int, int], Growth] = {}
            for i, (seq, limit) in enumerate(part.pairs):
                forced = request.forced.get(seq)
                if forced:
                    most = min(len(forced), self._most, limit)
                    growths[seq] = Growth(0, deepest=most, own=False, forced=forced)
                    continue
                if not plan.own:
                    growths[seq] = copying(plan.text[i])
                    continue
                self._reading.step_begins(seq, self._cache.lengths[seq])
                depths = self._depths(limit)
                if depths not in drafting:
                    drafting[depths] = self._growth(seq, *depths)
                growths[seq] = drafting[depths]
        done = fused.run(seqs, [growths[seq] for seq in seqs])
        for seq, step in zip(seqs, done, strict=True):
            self._choice.learn_fused(seq, step)
        return done

    def _plans(self, request: DraftRequest) -> Iterator[tuple[DraftRequest, Plan]]:
        """Parts of the request, one for each set of estimates, with their plans."""
        for group in self._choice.groups(request.seqs):
            part = request.part(group)
            yield part, self._choice.plan(part, self.behind(part.seqs))

    def _growth(self, seq: int, depth: int, deepest: int) -> Growth:
        """How a sequence's step drafts with the draft branch."""
        known = self._choice.estimates(seq)
        return Growth(
            depth,
            known.draft_threshold,
            known.verify_threshold,
            deepest,
            known.continuations.draft_accepted,
        )

    def _enter_fused(self, fused: FusedSequences, seq: int, last_token: int) -> None:
        pending, known = self._reading.pending.pop(seq), self._choice.estimates(seq)
        fused.enter(
            seq,
            [*pending.ids, last_token],
            torch.cat([*pending.carried, pending.last[None]]),
            [*self._similar.get(seq, ()), *self._sampler.tokens[seq]]
            if self._lookup.longest
            else None,
            known.continuations,
            known.calibration,
        )

    def draft(self, request: DraftRequest) -> list[Draft]:
        """Each level is one pass for all sequences that the branch drafts for."""
        made: dict[int, Draft] = {}
        drafted: list[int] = []
        for part, plan in self._plans(request):
            for i, (seq, limit) in enumerate(part.pairs):
                if seq in request.forced:
                    made[seq] = self._from_text(seq, min(self._most, limit))
                elif plan.own:
                    drafted.append(seq)
                else:
                    made[seq] = self._from_text(seq, plan.text[i])
        if drafted:
            part = request.part([list(request.seqs).index(seq) for seq in drafted])
            growing = [
                self._growing(seq, last_token, limit)
                for (seq, limit), last_token in zip(part.pairs, part.last_tokens, strict=True)
            ]
            drafts = self._grower.grow(growing, request.sampler, self._candidates)
            self._trees |= {one.seq: one.tree for one in growing}
            made.update(zip(part.seqs, drafts, strict=True))
        return [made[seq] for seq in request.seqs]

    def _growing(self, seq: int, last_token: int, limit: int) -> GrowingDraft:
        assert self._cache is not None
        length, known = self._cache.lengths[seq], self._choice.estimates(seq)
        self._reading.step_begins(seq, length)
        tree = DraftTree(
            *self._depths(limit),
            calibrated=known.calibration,
            nodes=self.config.nodes,
            min_probability=self._min_probability,
        )
        return GrowingDraft(
            seq,
            length,
            last_token,
            self._reading.pending[seq],
            known,
            self._choice.text_of(seq) if self._lookup.longest else None,
            tree,
        )

    def _depths(self, limit: int) -> tuple[int, int]:
        """(levels that the branch may draft, maximum depth with copied tokens)."""
        return min(self.config.depth, self.config.nodes, limit), min(self._most, limit)

    def _from_text(self, seq: int, count: int) -> Draft:
        """The text's continuation by itself; the step runs the layers below the gate."""
        match = self._choice.match(seq)
        tree = DraftTree(0)
        tree.continue_with(match.continuation[:count], match.matched)
        self._trees[seq] = tree
        return Draft(tree.tokens, tree.parents, copied=tree.copied)

    @property
    def _candidates(self) -> int:
        """Tokens looked at below a node: one more than the width may become a leaf."""
        c = self.config
        return 1 if c.width == 1 and c.nodes <= c.depth else c.width + 1
