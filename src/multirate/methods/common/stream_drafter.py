"""Drafts of a trained stream: trees of its likeliest tokens, ended by what the text said before,
lossless by verification.

A step: the stream's rows of the last token and of the tokens accepted since the last draft run with
their *true* carried residuals (the latter only refresh the K/V of the stream's own layer); every
further level runs the new nodes with the stream's own output as carried residual. Where the stream
begins in the model's first layers, the slow rows of all nodes go through these in the same calls,
and verification starts after them (docs/methods/m2r2.md, point 7). What the stream is, its runner
knows (draft_runner.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from multirate.decoding.acceptance_statistics import Calibration, ContinuationRates
from multirate.decoding.costs import CostModel
from multirate.decoding.draft_length import DraftLengthController, Plan, StepCosts
from multirate.decoding.drafter import Draft, Drafter, FusedStep, Verified
from multirate.decoding.sampler import Sampler
from multirate.decoding.text_source import TextSource
from multirate.errors import say_once
from multirate.methods.common.draft_runner import DraftRunner, NativeDraftRunner
from multirate.methods.common.draft_tree import DraftTree
from multirate.methods.common.fused_steps import (
    FusedSequences,
    FusedSteps,
    Growth,
    newest,
    run_together,
)
from multirate.methods.common.lookup import Lookup
from multirate.methods.common.stream_config import StreamDecodeConfig
from multirate.model.decoder import Decoder, argmax_rows
from multirate.model.kv_cache import KVCache
from multirate.model.native import NativeDecoder, abi
from multirate.model.native.decoder import narrow_weights
from multirate.model.rows import Rows


@dataclass
class _Waiting:
    """What a sequence's next draft must know: committed tokens that the stream's own layer has not
    read with their true carried residuals, and the last token's carried residual.
    """

    ids: list[int]
    carried: list[Tensor]  # [len(ids), d] in pieces: what is carried of the token before each;
    # empty after fused steps of a stream that reads none
    last: Tensor  # [d]: what is carried of the last committed token

    def add(self, ids: Sequence[int], carried: Tensor) -> None:
        self.ids += ids
        self.carried.append(carried)

    def keep_newest(self, count: int | None) -> bool:
        """Only the last `count` tokens; None: all. Returns whether there were more."""
        before = len(self.ids)
        self.ids, self.carried = newest(self.ids, self.carried, count)
        return len(self.ids) < before

    def keep(self, count: int) -> None:
        """Only the first `count` tokens."""
        self.ids = self.ids[:count]
        known = self.ids and self.carried
        self.carried = [torch.cat(self.carried)[:count].clone()] if known else []


@dataclass
class _Match:
    """What the text had after the tokens it ends in, when a step began."""

    continuation: list[int]
    matched: int


_NO_MATCH = _Match([], 0)


@dataclass
class _Estimates:
    """What drafts go by, learned as decoding goes on. draft_threshold, verify_threshold: [nodes],
    of the step under way.
    """

    continuations: ContinuationRates
    draft_threshold: np.ndarray
    verify_threshold: np.ndarray
    controller: DraftLengthController | None = None
    calibration: Calibration | None = None


# A lossy text must not depend on what the clock says, so what its drafts cost is not measured. In
# plain steps, as measured of SmolLM2-135M on an AVX-512 processor (docs/experiments.md).
_LOSSY_COSTS = StepCosts(
    plain_step=1.0,
    verify={1: 0.97, 2: 0.99, 4: 1.03, 8: 1.13, 12: 1.28, 16: 1.56, 24: 2.1, 32: 2.9, 60: 5.2},
    draft_step=0.06,
)
# The same where drafts are verified with narrow weights, in plain steps with these.
_NARROW_COSTS = StepCosts(
    plain_step=1.0,
    verify={1: 1.0, 2: 1.0, 4: 1.02, 6: 1.1, 8: 1.2, 10: 1.3, 12: 1.4, 16: 1.7, 24: 2.5, 60: 6.0},
    draft_step=0.05,
)
# Where only one of the two thresholds is set.
_MOST_NODES = 59  # of a draft with trusted tokens: one row of a pass is the last token's
_FIXED_DRAFT_THRESHOLD, _FIXED_VERIFY_THRESHOLD = 0.3, 0.1


@dataclass(frozen=True)
class Trusting:
    """Dynamic mode: the best tokens whose score is at least `threshold` are emitted unverified
    where a draft arrives at them, `nodes` of them on top of the others at most. by_arla: the score
    is the runner's `agreement`, not the confidence.
    """

    threshold: float
    nodes: int
    by_arla: bool


class StreamDrafter(Drafter):
    """Drafts with a stream on any decoder; on the native one steps are fused.

    start: layers of the model that the stream's runner runs of the drafted rows. refresh: whether
    the stream has K/V of its own. carry: whether it reads a carried residual. judged_by_arla:
    whether drafts grow by the runner's `agreement` instead of the confidence. min_probability: a
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
        judged_by_arla: bool = False,
        min_probability: float = 0.0,
    ) -> None:
        self.decoder, self.runner, self.config = decoder, runner, config
        self.start, self.taps = start, runner.taps
        self._lookup = Lookup.of(config.lookup, config.texts, decoder)
        self._trusting = trusting
        fuses = (
            not judged_by_arla
            and isinstance(decoder, NativeDecoder)
            and isinstance(runner, NativeDraftRunner)
        )
        self._margin = config.margin if fuses and narrow_weights(decoder) else None
        if config.margin is not None and self._margin is None:
            say_once(
                f"{config.METHOD} setting margin={config.margin}: 8-bit weights verify only on the "
                "native kernel, where the processor multiplies bytes (AVX-512 with VNNI); here all "
                "drafts are verified with the model's own"
            )
        self.lossless = trusting is None and self._margin is None
        self.max_nodes = config.nodes
        if trusting is not None:
            most = min(_MOST_NODES, config.nodes + trusting.nodes)
            self.max_nodes = max(self.max_nodes, most)
        self.repeats_text = self.lossless and config.drafts != "drawn"
        self._prices = config.draft_threshold is None or config.verify_threshold is None
        self.adapts = self.lossless and self._prices
        self._refresh, self._carry, self._judged_by_arla = refresh, carry, judged_by_arla
        self._min_probability = min_probability
        self._cache: KVCache | None = None
        self._samples = False  # whether the generation under way is not greedy
        self._waiting: dict[int, _Waiting] = {}
        # Of sequence 0: tokens whose K/V in the stream's own layer are final, but for those before
        # `_seen_from`, which are not there: its window ended after them.
        self._refreshed = self._seen_from = 0
        self._shared = self._new_estimates()
        self._own: dict[int, _Estimates] = {}  # by sequence
        self._streamed: set[int] = set()  # sequences whose step under way the stream drafts
        self._matches: dict[int, _Match] = {}
        self._texts: dict[int, TextSource] = {}
        self._trees: dict[int, DraftTree] = {}  # of the last drafts, by sequence
        self._fused: FusedSequences | None = None
        if fuses and isinstance(decoder, NativeDecoder) and isinstance(runner, NativeDraftRunner):
            if trusting is not None:
                self._trust = abi.new(
                    "Trust",
                    least=trusting.threshold,
                    arla=runner.arla if trusting.by_arla else None,
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
            margin=self._margin,
            window=runner.window,
        )

    def _new_estimates(self) -> _Estimates:
        draft_threshold, verify_threshold = (
            np.full(self.max_nodes, fixed if c is None else c)
            for c, fixed in (
                (self.config.draft_threshold, _FIXED_DRAFT_THRESHOLD),
                (self.config.verify_threshold, _FIXED_VERIFY_THRESHOLD),
            )
        )
        rates = ContinuationRates(self._lookup.longest, self._lookup.told)
        made = _Estimates(rates, draft_threshold, verify_threshold)
        if not self.lossless and self._prices:
            made.controller = DraftLengthController(
                _LOSSY_COSTS if self._margin is None else _NARROW_COSTS,
                self.max_nodes,
                rates,
                timed=False,
            )
            made.calibration = Calibration()
        return made

    def _estimates(self, seq: int) -> _Estimates:
        """The sequence's. A lossy text must depend neither on the others' of a batch nor on the
        generations before; what drafts of lossless ones go by is of all of them.
        """
        if self.lossless:
            return self._shared
        if seq not in self._own:
            self._own[seq] = self._new_estimates()
        return self._own[seq]

    def trial_step(self) -> Callable[[], object]:
        """One level of one node on a cache of its own."""
        self.runner.begin(self.decoder.new_cache(1, 64))
        rows = Rows.causal(0, 40, 1)
        carried = torch.zeros(1, self.decoder.info.hidden_size, device=self.decoder.info.device)

        def level() -> object:
            _, p = self.runner.step([0], rows, carried if self._carry else None, fresh=1)
            return self.runner.top(p, self._candidates)

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
            shared.controller = DraftLengthController(
                costs, self.config.nodes, shared.continuations, self.expected
            )
            shared.calibration = Calibration()
        if shared.controller is not None:
            shared.controller.pause()
        self.runner.begin(cache)
        self._enter(cache, sampler)

    def _enter(self, cache: KVCache, sampler: Sampler) -> None:
        self._cache, self._sampler, self._samples = cache, sampler, not sampler.greedy
        self._waiting, self._refreshed, self._seen_from = {}, 0, 0
        self._texts, self._trees, self._matches = {}, {}, {}
        self._own, self._streamed = {}, set()
        self._refused = -np.inf
        if self._fused is not None:
            self._fused.begin(self._begin_fused)

    def _begin_fused(self, steps: FusedSteps) -> None:
        assert isinstance(self.runner, NativeDraftRunner)
        steps.begin(
            self.runner.native_cache,
            self.runner.own_cache,
            self._sampler,
            couple=self.config.drafts == "coupled",
            top=self._candidates,
        )

    @property
    def refused(self) -> float | None:  # type: ignore[override]
        if self.lossless or self._margin is not None:
            return None
        fused = -np.inf if self._fused is None else self._fused.refused
        return max(self._refused, fused)

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

    def _left_behind(self) -> _Waiting:
        """The tokens after the refreshed ones of sequence 0 that the block could read."""
        if self._fused is not None and 0 in self._fused:
            ids, carried = self._fused[0].pending()
            return _Waiting(list(ids), list(carried), torch.empty(0))
        return self._waiting.get(0) or _Waiting([], [], torch.empty(0))

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
        """Prompts are read by the block when the stream drafts first: what it will see of them."""
        window = self.runner.window
        for seq, prompt, final, inner in zip(seqs, prompts, hidden_final, taps, strict=True):
            unseen = 0 if window is None else max(0, len(final) - window - 1)
            hidden = self.runner.carried(
                final[unseen:], {layer: states[unseen:] for layer, states in inner.items()}
            )
            waiting = self._waiting.setdefault(seq, _Waiting([], [], hidden[-1]))
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
        """What came true of a step's draft. tree: with the nodes that the stream or the text gave,
        where these are known; path: the accepted ones; nodes: how many there were. draft_seconds:
        what making it took; None: unknown.
        """
        match, streamed = self._matches.get(seq, _NO_MATCH), seq in self._streamed
        known = self._estimates(seq)
        if streamed and self._lookup.longest and tree.drafted + 1 not in tree.trusted:
            # else the continuation begins with a trusted token, which nobody has judged
            known.continuations.observe(tree.origin, *tree.accepted(path))
        if known.controller is None:
            return
        levels = max(tree.depth[: tree.drafted + 1]) + 1 if streamed else 0
        known.controller.emitted(len(emitted), levels, nodes, match.matched, draft_seconds)
        best = tree.best
        if match.matched:
            known.continuations.observe_text(
                match.continuation, match.matched, emitted, best and best[0]
            )
        if known.calibration is not None and streamed:
            if best is not None and not tree.trusts_best:  # known whether or not it was verified
                known.calibration.observe_one(best[1], best[0] == emitted[0])
            accepted = set(path)
            for node, (parent, token, sure) in enumerate(
                zip(tree.parents, tree.tokens, tree.confidence, strict=True), start=1
            ):
                if (
                    sure >= 0
                    and node not in tree.trusted
                    and parent in accepted
                    and (parent or best is None or token != best[0])
                ):
                    known.calibration.observe_one(sure, node in accepted)

    def _choose(self, seqs: Sequence[int], limits: Sequence[int], behind: int) -> Plan:
        """A step of sequences with the same estimates begins: what it drafts with, and the
        thresholds.
        """
        known = self._estimates(seqs[0])
        self._price(known, len(seqs))
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
            match = _NO_MATCH
            if self._lookup.longest:
                if self._fused is not None and seq in self._fused:
                    match = _Match(*self._fused[seq].look_up(nodes))
                else:
                    match = _Match(*self._text_of(seq).look_up(self._sampler.tokens[seq], nodes))
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
        if fused is None or self._draws(self._sampler):
            return None
        if self._trusting is not None and not self._sampler.plain:
            return None  # drawn tokens: the kernel trusts none
        if len(seqs) > 1 and not (self.lossless and self._sampler.by_argmax):
            return None
        for seq, last_token in zip(seqs, last_tokens, strict=True):
            if seq not in fused:
                self._enter_fused(fused, seq, last_token)
        known = self._estimates(seqs[0])
        plan = self._choose(seqs, limits, self.behind(seqs))
        growths = []
        for i, (seq, limit) in enumerate(zip(seqs, limits, strict=True)):
            if plan.stream:
                self._note_refreshed(seq)
                depth = min(self.config.depth, self.config.nodes, limit)
                deepest = min(self.max_nodes, limit)
            else:
                depth, deepest = 0, plan.text[i]
            growths.append(
                Growth(
                    depth,
                    known.draft_threshold,
                    known.verify_threshold,
                    deepest,
                    known.continuations.draft_accepted,
                    plan.stream,
                )
            )
        done = run_together([fused[seq] for seq in seqs], growths)
        if known.controller is not None or self._lookup.longest:
            for seq, step in zip(seqs, done, strict=True):
                self._learn_fused(seq, fused[seq], step)
        return done

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

    def _price(self, known: _Estimates, sequences: int) -> None:
        """Thresholds of the next step, from the costs where the settings leave them open."""
        if known.controller is not None:
            draft_threshold, verify_threshold = known.controller.thresholds(sequences)
            if self.config.draft_threshold is None:
                known.draft_threshold = draft_threshold
            if self.config.verify_threshold is None:
                known.verify_threshold = verify_threshold

    def draft(
        self,
        seqs: Sequence[int],
        last_tokens: Sequence[int],
        limits: Sequence[int],
        sampler: Sampler,
    ) -> list[Draft]:
        """One pass of both streams per level, all sequences in it whose draft is the stream's."""
        every = list(range(len(seqs)))
        made: dict[int, Draft] = {}
        streamed: list[int] = []
        for group in [every] if self.lossless else [[i] for i in every]:
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
            drafts = self._from_stream(
                those, [last_tokens[i] for i in streamed], [limits[i] for i in streamed], sampler
            )
            made.update(zip(those, drafts, strict=True))
        return [made[seq] for seq in seqs]

    def _from_stream(
        self,
        seqs: Sequence[int],
        last_tokens: Sequence[int],
        limits: Sequence[int],
        sampler: Sampler,
    ) -> list[Draft]:
        in_trees = not sampler.settings.uses_context and not self._draws(sampler)
        limit = min(self.config.depth, self.config.nodes)
        trees = [
            DraftTree(
                min(limit, wanted),
                min(self.max_nodes, wanted),
                calibrated=self._estimates(seq).calibration,
                nodes=self.config.nodes,
                min_probability=self._min_probability,
            )
            for seq, wanted in zip(seqs, limits, strict=True)
        ]
        h_gate, p = self._first_pass(seqs, last_tokens)
        hidden: list[list[Tensor]] = [[row] for row in h_gate.split(1)]
        outputs: list[dict[int, Tensor]] = [{0: row} for row in p.split(1)]  # node → its p [1, d]
        probs: list[list[Tensor]] = [[] for _ in seqs]
        frontier: list[list[int]] = [[0] for _ in seqs]
        live = [i for i, tree in enumerate(trees) if tree.depth_limit > 0]
        while live:
            p = torch.cat([outputs[i][node] for i in live for node in frontier[i]])
            if in_trees:
                self._grow_best(trees, live, frontier, p, seqs, sampler)
            else:
                self._grow_drawn(trees, live, frontier, p, seqs, sampler, probs)
            live = [i for i in live if frontier[i]]
            if live:
                self._next_pass(trees, live, frontier, seqs, hidden, outputs)
        self._trees.update(zip(seqs, trees, strict=True))
        return self._finish(trees, seqs, hidden, probs, in_trees)

    def _draws(self, sampler: Sampler) -> bool:
        """Whether drafts are drawn independently of what the model will draw."""
        return self.config.drafts == "drawn" and not sampler.greedy

    def _from_text(self, seq: int, count: int) -> Draft:
        """The text's continuation by itself; the step runs the layers below the gate."""
        match = self._matches.get(seq, _NO_MATCH)
        tree = DraftTree(0)
        tree.continue_with(match.continuation[:count], match.matched)
        self._trees[seq] = tree
        return Draft(tree.tokens, tree.parents, copied=tree.copied)

    @property
    def _candidates(self) -> int:
        """Tokens looked at below a node: one more than the width may become a leaf, when sampling
        some more.
        """
        c = self.config
        if c.width == 1 and c.nodes <= c.depth:
            return 1
        return max(c.width + 1, c.sampled_candidates if self._samples else 0)

    # -- the passes --------------------------------------------------------------------------------

    def _first_pass(self, seqs: Sequence[int], last_tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Refreshed rows of all sequences, then their last tokens → (h_G, p), [len(seqs), d] each,
        of these.
        """
        assert self._cache is not None
        lengths = self._cache.lengths
        parts, ids, carried = [], [], []
        for seq in seqs:
            self._note_refreshed(seq)
            waiting = self._waiting[seq]
            waiting.keep_newest(self.runner.window)
            if waiting.ids:
                parts.append(Rows.causal(seq, lengths[seq] - len(waiting.ids), len(waiting.ids)))
                ids += waiting.ids
                carried += waiting.carried
        for seq, token in zip(seqs, last_tokens, strict=True):
            parts.append(Rows.causal(seq, lengths[seq], 1))
            ids.append(token)
            carried.append(self._waiting[seq].last[None])
        h_gate, p = self.runner.step(
            ids, Rows.concat(parts), torch.cat(carried) if self._carry else None, fresh=len(seqs)
        )
        for seq in seqs:
            self._waiting[seq].keep(0)
        return h_gate, p[len(ids) - len(seqs) :]

    def _next_pass(
        self,
        trees: list[DraftTree],
        live: list[int],
        frontier: list[list[int]],
        seqs: Sequence[int],
        hidden: list[list[Tensor]],
        outputs: list[dict[int, Tensor]],
    ) -> None:
        """Runs the frontier nodes of the live sequences; adds their h_G to `hidden` and their p to
        `outputs`.
        """
        nodes = [(i, node) for i in live for node in frontier[i]]
        rows = self._rows_of(trees, nodes, seqs)
        carried = (
            torch.cat([outputs[i][trees[i].parents[node - 1]] for i, node in nodes])
            if self._carry
            else None
        )
        h_gate, p = self.runner.step(
            [trees[i].tokens[node - 1] for i, node in nodes], rows, carried, fresh=len(nodes)
        )
        for k, (i, node) in enumerate(nodes):
            hidden[i].append(h_gate[k : k + 1])
            outputs[i][node] = p[k : k + 1]

    def _rows_of(
        self, trees: list[DraftTree], nodes: list[tuple[int, int]], seqs: Sequence[int]
    ) -> Rows:
        assert self._cache is not None
        lengths = self._cache.lengths
        seq = [seqs[i] for i, _ in nodes]
        length = np.array([lengths[b] for b in seq], dtype=np.int32)
        return Rows(
            np.array(seq, dtype=np.int32),
            length + np.array([node for _, node in nodes], dtype=np.int32),
            length + np.array([trees[i].depth[node] for i, node in nodes], dtype=np.int32),
            length + np.int32(1),
            np.array([trees[i].bits[node] for i, node in nodes], dtype=np.int64),
        )

    # -- growing -----------------------------------------------------------------------------------

    def _grow_best(
        self,
        trees: list[DraftTree],
        live: list[int],
        frontier: list[list[int]],
        p: Tensor,
        seqs: Sequence[int],
        sampler: Sampler,
    ) -> None:
        """Trees of the stream's likeliest tokens, when sampling by logits that have the noise of
        the model's own.
        """
        c, noise = self.config, None
        if not sampler.greedy and c.drafts == "coupled":
            noise = [
                sampler.noise(seqs[i], trees[i].depth[node]) for i in live for node in frontier[i]
            ]
        ids, best = self.runner.top(p, self._candidates, c.sharpness, noise)
        trusted = self._trusted(p, lambda: [row[0] for row in best])
        if self._judged_by_arla:
            best = [
                _with_first(row, score)
                for row, score in zip(best, self.runner.agreement(p), strict=True)
            ]
        at = 0
        for i in live:
            count = len(frontier[i])
            followed = agrees = False
            if count == 1 and trees[i].is_chain:
                followed, agrees = self._continue(
                    trees[i], seqs[i], ids[at][0], best[at][0], trusted[at]
                )
            known = self._estimates(seqs[i])
            frontier[i] = trees[i].grow(
                frontier[i],
                ids[at : at + count],
                best[at : at + count],
                0 if followed else c.width,
                known.draft_threshold,
                known.verify_threshold,
                first=int(agrees),
                trusted=trusted[at : at + count],
            )
            at += count

    def _continue(
        self, tree: DraftTree, seq: int, best: int, own: float, trusted: bool
    ) -> tuple[bool, bool]:
        """Lets the tree, a chain so far, end in what the text said after the same tokens, where
        that is worth it. → whether it does, and with the stream's best token.
        """
        most = min(tree.deepest, tree.budget(self.max_nodes)) - len(tree.tokens)
        if not self._lookup.longest or most <= 0:
            return False, False
        text = self._sampler.tokens[seq]
        continuation, matched = self._text_of(seq).look_up(text, most, tree.tokens)
        if not matched:
            return False, False
        agrees, known = continuation[0] == best, self._estimates(seq)
        length = tree.continuation_length(
            most,
            tree.worth(own),
            matched,
            known.continuations,
            known.draft_threshold,
            known.verify_threshold,
            agrees,
            trusted,
        )
        if length:
            tree.continue_with(continuation[:length], matched, trusted)
        return length > 0, length > 0 and agrees

    def _text_of(self, seq: int) -> TextSource:
        """What the sequence's text is looked up in."""
        if seq not in self._texts:
            self._texts[seq] = self._lookup.source()
        return self._texts[seq]

    def _grow_drawn(
        self,
        trees: list[DraftTree],
        live: list[int],
        frontier: list[list[int]],
        p: Tensor,
        seqs: Sequence[int],
        sampler: Sampler,
        probs: list[list[Tensor]],
    ) -> None:
        """Chains, by the settings' whole pipeline: for a repetition penalty, and for tokens drawn
        independently. Whether to go on is decided before a token is drawn, as Draft.probs demands.
        """
        logits = self.runner.logits(p)
        rows_seqs = [seqs[i] for i in live]
        paths = [trees[i].tokens for i in live]
        draws = self._draws(sampler)
        if draws:
            q = sampler.distribution(logits, rows_seqs, paths)
            tokens = sampler.draw(q, rows_seqs)
        else:
            perturbed = sampler.perturbed(logits, rows_seqs, paths)
            q, tokens = torch.softmax(perturbed, dim=-1), argmax_rows(perturbed)
        # of the logits: the distribution of greedy tokens under a penalty is sure of each
        trusted = self._trusted(
            p, lambda: torch.softmax(self.config.sharpness * logits, -1).amax(-1).tolist()
        )
        sure = self.runner.agreement(p) if self._judged_by_arla else q.amax(-1).tolist()
        for k, i in enumerate(live):
            tree, node = trees[i], frontier[i][0]
            if (
                tree.levels[node] + (not trusted[k]) > tree.depth_limit
                or tree.depth[node] >= tree.deepest
                or len(tree.tokens) >= tree.budget(self.max_nodes)
                or (
                    node
                    and (
                        tree.path_probability[node]
                        < self._estimates(seqs[i]).draft_threshold[node - 1]
                        or tree.confidence[node - 1] < tree.min_probability
                    )
                )
            ):
                frontier[i] = []
                continue
            chance = tree.path_probability[node]
            if not trusted[k]:
                chance *= tree.worth(sure[k])
            frontier[i] = [tree.add(node, tokens[k], chance, sure[k], trusted[k])]
            tree.drafted += 1
            if draws:
                probs[i].append(q[k : k + 1])

    def _trusted(self, p: Tensor, confidence: Callable[[], list[float]]) -> list[bool]:
        """For each row of p [n, d] whether its token is emitted unverified. confidence: the
        sharpened top-1 probabilities.
        """
        trusting = self._trusting
        if trusting is None:
            return [False] * len(p)
        scores = self.runner.agreement(p) if trusting.by_arla else confidence()
        low = [score for score in scores if score < trusting.threshold]
        self._refused = max([self._refused, *low])
        return [score >= trusting.threshold for score in scores]

    def _finish(
        self,
        trees: list[DraftTree],
        seqs: Sequence[int],
        hidden: list[list[Tensor]],
        probs: list[list[Tensor]],
        in_trees: bool,
    ) -> list[Draft]:
        """Adds the leaves; their slow rows (and those of nodes not run yet) go through the layers
        below the gate.
        """
        missing: list[tuple[int, int]] = []
        whole = not self.runner.keys_only  # else the step runs all rows through the layers below
        for i, tree in enumerate(trees):
            if in_trees:
                tree.finish(self._estimates(seqs[i]).verify_threshold)
            if whole:
                missing += [(i, node) for node in range(len(hidden[i]), len(tree.tokens) + 1)]
        if missing:
            rows = self._rows_of(trees, missing, seqs)
            h_gate = self.runner.slow([trees[i].tokens[node - 1] for i, node in missing], rows)
            for k, (i, _) in enumerate(missing):
                hidden[i].append(h_gate[k : k + 1])
        return [
            Draft(
                tree.tokens,
                tree.parents,
                torch.cat(hidden[i]) if whole else None,
                torch.cat(probs[i]) if probs[i] else None,
                frozenset(tree.trusted),
                tree.copied,
            )
            for i, tree in enumerate(trees)
        ]


def _with_first(probs: list[float], first: float) -> list[float]:
    """The candidates' probabilities with another one for the best: the others share what is left,
    as before.
    """
    rest = (1 - first) / max(1 - probs[0], 1e-9)
    return [first, *(min(prob * rest, first) for prob in probs[1:])]
