"""Drafts of a trained draft branch: trees of its likeliest tokens, which text lookup may end;
verification makes them lossless.

In a step, the draft branch's rows of the last token and of the tokens accepted since the last draft
run with their *true* carried residuals; the latter only backfill the K/V of the branch's own layer.
Every further level runs the new nodes with the branch's own output as carried residual. If the
branch starts in the model's first layers, all nodes' slow rows go through these in the same calls,
and verification starts after them (docs/methods/m2r2.md). The runner knows what kind of branch it
is (draft_runner.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.budget import DraftLengthController, Plan, StepCosts
from multirate.decoding.speculate.costs import CostModel
from multirate.decoding.speculate.drafter import Draft, Drafter, FusedStep, Verified
from multirate.decoding.speculate.text_source import TextSource
from multirate.methods._shared.draft_grower import DraftGrower, GrowingDraft, Trusting
from multirate.methods._shared.draft_runner import DraftRunner, NativeDraftRunner
from multirate.methods._shared.draft_tree import DraftTree
from multirate.methods._shared.fused_sequences import FusedSequences
from multirate.methods._shared.fused_steps import FusedSteps, Growth, run_together
from multirate.methods._shared.lookup import Lookup
from multirate.methods._shared.stream_config import StreamDecodeConfig
from multirate.methods._shared.stream_estimates import (
    LOSSY_COSTS,
    NO_MATCH,
    Match,
    StreamEstimates,
)
from multirate.methods._shared.waiting_tokens import WaitingTokens
from multirate.runtime.decoder import Decoder
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.native import NativeDecoder, abi
from multirate.runtime.rows import Rows

_MOST_NODES = 59  # of a draft with trusted tokens: one row of a pass is the last token's


class StreamDrafter(Drafter):
    """Drafts with a stream on any decoder; on the native one steps are fused.

    start: layers of the model that the stream's runner runs of the drafted rows. refresh: whether
    the stream has K/V of its own. carry: whether it reads a carried residual. min_probability: a
    node whose own is lower is not drafted from.
    """

    def __init__(
        self,
        decoder: Decoder,
        runner: DraftRunner,
        config: StreamDecodeConfig,
        *,
        start: int = 0,
        refresh: bool = True,
        carry: bool = True,
        trusting: Trusting | None = None,
        min_probability: float = 0.0,
    ) -> None:
        self.decoder, self.runner, self.config = decoder, runner, config
        self.start, self.taps = start, runner.taps
        self._lookup = Lookup.of(config.texts, decoder) if config.lookup else Lookup(0)
        self.looks_up = self._lookup.longest > 0
        self._trusting = trusting
        fuses = isinstance(decoder, NativeDecoder) and isinstance(runner, NativeDraftRunner)
        self.lossless = trusting is None
        self.max_nodes = config.nodes
        if trusting is not None:
            most = min(_MOST_NODES, config.nodes + trusting.nodes)
            self.max_nodes = max(self.max_nodes, most)
        self._prices = config.draft_threshold is None or config.verify_threshold is None
        self.adapts = self.lossless and self._prices
        self._refresh, self._carry, self._min_probability = refresh, carry, min_probability
        self._grower = DraftGrower(
            runner,
            config,
            max_nodes=self.max_nodes,
            carry=carry,
            trusting=trusting,
        )
        self._cache: KVCache | None = None
        self._waiting: dict[int, WaitingTokens] = {}
        # Of sequence 0: tokens whose K/V in the stream's own layer are final, but for those before
        # `_seen_from`, which are not there: its window ended after them.
        self._refreshed = self._seen_from = 0
        self._lossy_costs = None if self.lossless else LOSSY_COSTS
        self._shared = self._new_estimates(self._lossy_costs)
        self._own: dict[int, StreamEstimates] = {}  # by sequence
        self._streamed: set[int] = set()  # sequences whose step under way the stream drafts
        self._matches: dict[int, Match] = {}
        self._texts: dict[int, TextSource] = {}
        self._trees: dict[int, DraftTree] = {}  # of the last drafts, by sequence
        self._fused: FusedSequences | None = None
        if fuses and isinstance(decoder, NativeDecoder) and isinstance(runner, NativeDraftRunner):
            if trusting is not None:
                self._trust = abi.new(
                    "Trust",
                    least=trusting.threshold,
                    scorer=runner.arla if trusting.by_arla else None,
                    nodes=self.max_nodes - config.nodes,
                )
            self._fused = FusedSequences(partial(self._new_fused, decoder, runner))
        if isinstance(runner, NativeDraftRunner):
            runner.see(config.window)

    def _new_fused(self, decoder: NativeDecoder, runner: NativeDraftRunner) -> FusedSteps:
        config = self.config
        limits = abi.new(
            "DraftLimits",
            nodes=config.nodes,
            width=config.width,
            top=self._candidates,
            sharpness=config.sharpness,
            min_probability=self._min_probability,
            trust=None if self._trusting is None else self._trust,
            ngram=abi.new("NgramLimits", longest=self._lookup.longest),
        )
        return FusedSteps(
            decoder,
            runner.packed,
            runner.head,
            limits,
            refresh=self._refresh,
            automaton=self._lookup.automaton,
            given=self._lookup.given,
            window=runner.window,
        )

    def _new_estimates(self, costs: StepCosts | None) -> StreamEstimates:
        """costs: costs by which drafts grow, independent of the clock, where the settings leave
        thresholds open; None: still to be measured.
        """
        made = StreamEstimates.of(self.config, self.max_nodes, self._lookup)
        if costs is not None and self._prices:
            rates = made.continuations
            made.go_by(DraftLengthController(costs, self.max_nodes, rates, timed=False))
        return made

    def _estimates(self, seq: int) -> StreamEstimates:
        """The sequence's. A lossy text must depend neither on the others' of a batch nor on the
        generations before; what drafts of lossless ones go by is of all of them.
        """
        if self.lossless:
            return self._shared
        if seq not in self._own:
            self._own[seq] = self._new_estimates(self._lossy_costs)
        return self._own[seq]

    def trial_step(self) -> Callable[[], object]:
        """One level of one node on a cache of its own."""
        self.runner.begin(self.decoder.new_cache(1, 64))
        rows = Rows.causal(0, 40, 1)
        carried = torch.zeros(
            1, self.decoder.info.hidden_size, device=self.decoder.info.device, dtype=torch.float32
        )

        def level() -> object:
            count, given = self._candidates, carried if self._carry else None
            _, p, best = self.runner.level([0], rows, given, 1, count, self.config.sharpness)
            return best or self.runner.top(p, count, self.config.sharpness)

        return level

    def costs(self, decoder: Decoder) -> CostModel:
        if self._costs is None:
            plain = super().costs(decoder)
            self._costs = plain
            if self._fused is not None and isinstance(self.runner, NativeDraftRunner):
                steps = self._fused.any_of_them
                steps.learn_from(self._shared.continuations)
                self._costs = steps.measured(plain, self.runner.own_cache_for)
        return self._costs

    def begin(self, cache: KVCache, sampler: Sampler) -> None:
        shared = self._shared
        if shared.controller is None and self.adapts:
            costs = self.costs(self.decoder).costs
            shared.go_by(
                DraftLengthController(costs, self.config.nodes, shared.continuations, self.expected)
            )
        if shared.controller is not None:
            shared.controller.pause()
        self.runner.begin(cache)
        self._enter(cache, sampler)

    def _enter(self, cache: KVCache, sampler: Sampler) -> None:
        self._cache, self._sampler = cache, sampler
        self._waiting, self._refreshed, self._seen_from = {}, 0, 0
        self._texts, self._trees, self._matches = {}, {}, {}
        self._own, self._streamed = {}, set()
        self._grower.refused = -np.inf
        if self._fused is not None:
            self._fused.begin(self._begin_fused)

    def _begin_fused(self, steps: FusedSteps) -> None:
        assert isinstance(self.runner, NativeDraftRunner)
        steps.begin(
            self.runner.native_cache,
            self.runner.own_cache,
            self._sampler,
        )

    @property
    def refused(self) -> float | None:  # type: ignore[override]
        if self.lossless:
            return None
        fused = -np.inf if self._fused is None else self._fused.refused
        return max(self._grower.refused, fused)

    def usable(self, cache: KVCache, length: int) -> int:
        if cache is not self._cache or not self.runner.serves(cache):
            return 0
        if not self._refresh:
            return length
        length = min(length, self._refreshed + len(self._left_behind().ids))
        window = self.runner.window
        if window is not None and self._seen_from and length - window < self._seen_from:
            # the text parts from the earlier one where the own layer sees what it has not read
            return max(0, length - window)
        return length

    def _left_behind(self) -> WaitingTokens:
        """The tokens after the refreshed ones of sequence 0 that the block could read."""
        if self._fused is not None and 0 in self._fused:
            unread = self._fused[0].unread
            return WaitingTokens(list(unread.ids), list(unread.carried))
        return self._waiting.get(0) or WaitingTokens()

    def resume(self, cache: KVCache, sampler: Sampler) -> None:
        if self._shared.controller is not None:
            self._shared.controller.pause()
        behind, refreshed, seen_from = self._left_behind(), self._refreshed, self._seen_from
        self._enter(cache, sampler)
        if seen_from:  # where it lies ahead, what has been kept ends before, and the rest is read
            self._seen_from = min(seen_from, cache.lengths[0] + 1)
        # the token after the kept ones is read again and gives no carried residual of its own: what
        # is known of it is kept, too
        self._refreshed = min(refreshed, cache.lengths[0] + 1)
        behind.keep(cache.lengths[0] + 1 - self._refreshed)
        if behind.ids:
            self._waiting[0] = behind

    def prefill(
        self,
        seqs: Sequence[int],
        prompts: Sequence[Sequence[int]],
        hidden_final: Sequence[Tensor],
        taps: Sequence[Mapping[int, Tensor]],
    ) -> None:
        """The block reads what it will see of the prompts only before the first draft."""
        window = self.runner.window
        for seq, prompt, final, inner in zip(seqs, prompts, hidden_final, taps, strict=True):
            unseen = 0 if window is None else max(0, len(final) - window - 1)
            hidden = self.runner.carried(
                final[unseen:], {layer: states[unseen:] for layer, states in inner.items()}
            )
            waiting = self._waiting.setdefault(seq, WaitingTokens(last=hidden[-1]))
            waiting.last = hidden[-1]
            first = len(prompt) - len(hidden)
            carried = hidden[:-1]
            if first:
                # the first token read again has its K/V in the block, or is not seen; what it gives
                # is the next one's h_L
                first += 1
            else:
                carried = torch.cat([torch.zeros_like(hidden[:1]), carried])
            if unseen:
                waiting.keep(0)
            if self._refresh and first < len(prompt):
                waiting.add(prompt[first:], carried)
            forgotten = waiting.keep_newest(window)
            if seq == 0:
                self._refreshed = len(prompt) - len(waiting.ids)
                if unseen or forgotten:
                    self._seen_from = self._refreshed

    def behind(self, seqs: Sequence[int]) -> int:
        fused = self._fused
        return sum(
            fused[seq].behind if fused is not None and seq in fused else len(self._waiting[seq].ids)
            for seq in seqs
        )

    def accept(self, seq: int, verified: Verified) -> None:
        path = verified.path
        inner = {layer: verified.of_path(states) for layer, states in verified.taps.items()}
        carried = self.runner.carried(verified.accepted, inner)
        tree, tokens = self._trees.pop(seq, None), self._sampler.tokens[seq]
        self._learn(
            seq,
            tokens[-len(path) :],
            tree if tree is not None else DraftTree(0),
            path,
            len(verified.hidden) - 1,
        )
        waiting = self._waiting[seq]
        if self._refresh:
            if seq not in self._streamed:
                waiting.add(tokens[-len(path) - 1 : -len(path)], waiting.last[None])
            if len(path) > 1:
                # before the last token come the accepted nodes, whose carried residuals are now
                # known
                waiting.add(tokens[-len(path) : -1], carried[:-1])
        waiting.last = carried[-1]

    def _learn(
        self,
        seq: int,
        emitted: Sequence[int],
        tree: DraftTree,
        path: Sequence[int],
        nodes: int,
        draft_seconds: float | None = None,
    ) -> None:
        """What came true of the sequence's step: see StreamEstimates."""
        self._estimates(seq).observe(
            emitted,
            tree,
            path,
            nodes,
            match=self._matches.get(seq, NO_MATCH),
            streamed=seq in self._streamed,
            draft_seconds=draft_seconds,
        )

    def _choose(self, seqs: Sequence[int], limits: Sequence[int], behind: int) -> Plan:
        """Starts a step of sequences with the same estimates: what it drafts with, and the
        thresholds.
        """
        known = self._estimates(seqs[0])
        known.price(self.config, len(seqs))
        self._streamed |= set(seqs)
        if known.controller is None:
            if any(limits):
                return Plan(True)
            self._streamed -= set(seqs)
            return Plan(False, (0,) * len(seqs))
        nodes = self.config.nodes
        most = [min(nodes, limit) for limit in limits]
        found = []
        for seq, count in zip(seqs, most, strict=True):
            match = NO_MATCH
            if self._lookup.longest:
                if self._fused is not None and seq in self._fused:
                    match = Match(*self._fused[seq].look_up(nodes))
                else:
                    match = Match(*self._text_of(seq).look_up(self._sampler.tokens[seq], nodes))
            self._matches[seq] = match
            found.append((match.matched, count))
        plan = known.controller.choose(found, max(limits), behind, self.rests)
        if not plan.stream:
            self._streamed -= set(seqs)
        return plan

    def fused_steps(
        self, seqs: Sequence[int], last_tokens: Sequence[int], limits: Sequence[int]
    ) -> list[FusedStep] | None:
        fused = self._fused
        if fused is None:
            return None
        if self._trusting is not None and not self._sampler.plain:
            return None  # drawn tokens: the kernel trusts none
        if len(seqs) > 1 and not self._sampler.by_argmax:
            return None
        for seq, last_token in zip(seqs, last_tokens, strict=True):
            if seq not in fused:
                self._enter_fused(fused, seq, last_token)
        growths: dict[int, Growth] = {}
        for group in self._alike(seqs):
            those, left = [seqs[i] for i in group], [limits[i] for i in group]
            plan = self._choose(those, left, self.behind(those))
            for i, (seq, limit) in enumerate(zip(those, left, strict=True)):
                growths[seq] = self._growth(seq, limit, None if plan.stream else plan.text[i])
        done = run_together([fused[seq] for seq in seqs], [growths[seq] for seq in seqs])
        for seq, step in zip(seqs, done, strict=True):
            if self._estimates(seq).controller is not None or self._lookup.longest:
                self._learn_fused(seq, fused[seq], step)
        return done

    def _alike(self, seqs: Sequence[int]) -> list[list[int]]:
        """The places of sequences that go by the same estimates, together."""
        every = list(range(len(seqs)))
        return [every] if self.lossless else [[i] for i in every]

    def _growth(self, seq: int, limit: int, copied: int | None) -> Growth:
        """How a sequence's step drafts: with the draft branch, or (copied) with this many tokens of
        the text.
        """
        known = self._estimates(seq)
        depth, deepest = 0, copied
        if copied is None:
            self._note_refreshed(seq)
            depth, deepest = self._depths(limit)
        return Growth(
            depth,
            known.draft_threshold,
            known.verify_threshold,
            deepest,
            known.continuations.draft_accepted,
            stream=copied is None,
        )

    def _enter_fused(self, fused: FusedSequences, seq: int, last_token: int) -> None:
        """The sequence's first fused step begins."""
        waiting = self._waiting.pop(seq)
        known = self._estimates(seq)
        steps = fused.start(seq)
        steps.enter(
            seq,
            [*waiting.ids, last_token],
            torch.cat([*waiting.carried, waiting.last[None]]),
            self._sampler.tokens[seq] if self._lookup.longest else None,
        )
        steps.learn_from(known.continuations, known.calibration)

    def _learn_fused(self, seq: int, fused: FusedSteps, done: FusedStep) -> None:
        if not done.drafted and seq not in self._streamed:  # a plain step
            self._learn(seq, done.tokens, DraftTree(0), [0], 0, done.draft_seconds)
            return
        tokens, parents = fused.draft()
        origin, _, _ = fused.origin()
        tree = DraftTree(0, drafted=origin.drafted, continued=origin.continued)
        tree.matched, tree.best = origin.matched, fused.best()
        tree.tokens, tree.parents = tokens, parents
        tree.confidence, tree.trusted = fused.confidence(), fused.trusted()
        path, depth = [0], tree.depth
        for node, (parent, token) in enumerate(zip(parents, tokens, strict=True), start=1):
            depth.append(depth[parent] + 1)
            if parent == path[-1] and token == done.tokens[len(path) - 1]:
                path.append(node)
        self._learn(seq, done.tokens, tree, path, done.drafted, done.draft_seconds)

    def _note_refreshed(self, seq: int) -> None:
        """A step begins: it refreshes all of the sequence's committed tokens that were not yet and
        are seen, and the last one enters with its true carried residual.
        """
        assert self._cache is not None
        if seq == 0:
            length, window = self._cache.lengths[0], self.runner.window
            if window is not None and self.behind([0]) > window:
                self._seen_from = length - window
            self._refreshed = length + 1

    def draft(
        self,
        seqs: Sequence[int],
        last_tokens: Sequence[int],
        limits: Sequence[int],
        sampler: Sampler,
    ) -> list[Draft]:
        """One pass of both streams per level, all sequences in it whose draft is the stream's."""
        made: dict[int, Draft] = {}
        streamed: list[int] = []
        for group in self._alike(seqs):
            those = [seqs[i] for i in group]
            behind = sum(len(self._waiting[seq].ids) for seq in those)
            plan = self._choose(those, [limits[i] for i in group], behind)
            if plan.stream:
                streamed += group
            else:
                for seq, count in zip(those, plan.text, strict=True):
                    made[seq] = self._from_text(seq, count)
        if streamed:
            those = [seqs[i] for i in streamed]
            growing = [self._growing(seqs[i], last_tokens[i], limits[i]) for i in streamed]
            drafts = self._grower.grow(growing, sampler, self._candidates)
            self._trees |= {one.seq: one.tree for one in growing}
            made.update(zip(those, drafts, strict=True))
        return [made[seq] for seq in seqs]

    def _growing(self, seq: int, last_token: int, limit: int) -> GrowingDraft:
        assert self._cache is not None
        self._note_refreshed(seq)
        known = self._estimates(seq)
        tree = DraftTree(
            *self._depths(limit),
            calibrated=known.calibration,
            nodes=self.config.nodes,
            min_probability=self._min_probability,
        )
        return GrowingDraft(
            seq,
            self._cache.lengths[seq],
            last_token,
            self._waiting[seq],
            known,
            self._text_of(seq) if self._lookup.longest else None,
            tree,
        )

    def _depths(self, limit: int) -> tuple[int, int]:
        """Levels of a draft of at most `limit` tokens below one another, and the depth of any node
        of it.
        """
        return min(self.config.depth, self.config.nodes, limit), min(self.max_nodes, limit)

    def _from_text(self, seq: int, count: int) -> Draft:
        """The text's continuation by itself; the step runs the layers below the gate."""
        match = self._matches.get(seq, NO_MATCH)
        tree = DraftTree(0)
        tree.continue_with(match.continuation[:count], match.matched)
        self._trees[seq] = tree
        return Draft(tree.tokens, tree.parents, copied=tree.copied)

    @property
    def _candidates(self) -> int:
        """Tokens looked at below a node: one more than the width may become a leaf."""
        c = self.config
        return 1 if c.width == 1 and c.nodes <= c.depth else c.width + 1

    def _text_of(self, seq: int) -> TextSource:
        """What the sequence's text is looked up in."""
        if seq not in self._texts:
            self._texts[seq] = self._lookup.source()
        return self._texts[seq]
