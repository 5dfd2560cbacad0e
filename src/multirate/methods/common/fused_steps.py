"""Fused steps of one sequence in the kernel: draft, verification and acceptance in one call from
Python, greedily and at a temperature. With top-k, top-p or min-p in two, between which the sampler
chooses the tokens.

The state between two steps is what the kernel leaves: the tokens it emitted and h_L (or what the
stream reads instead) of the accepted path, which are the tokens to refresh (all but the last one,
which enters next) and their carried residuals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multirate.decoding.acceptance import Descent
from multirate.decoding.acceptance_statistics import Calibration, ContinuationRates, Origin
from multirate.decoding.costs import CostModel
from multirate.decoding.draft_length import CAUGHT_UP_WITHIN
from multirate.decoding.drafter import MAX_TREE_NODES, Draft, FusedStep
from multirate.decoding.given_texts import GivenTexts
from multirate.decoding.sampler import Sampler
from multirate.errors import UserError
from multirate.methods.common.draft_head import DraftHead
from multirate.methods.common.kernel_text import KernelText
from multirate.methods.common.stages import NOTHING, Behind, with_behind
from multirate.methods.common.waiting_tokens import UnreadTokens
from multirate.model.native import NativeDecoder, abi, library
from multirate.model.native.cache import NativeKVCache
from multirate.model.native.narrow_weights import NarrowWeights
from multirate.model.noise import NOT_FINITE
from multirate.model.rows import Rows

NARROW_PENDING: int = abi.constant("NARROW_PENDING")
REFRESH = 4
"""Minimum number of rows in a pass that re-checks uncertain tokens; it takes as long as a pass of
one row (lab/notes/dynamic-mode.md).
"""


@dataclass(frozen=True)
class Growth:
    """How a step drafts: at most ``depth`` levels, and continuations of ``deepest`` tokens (None:
    as many).

    stream: False: a draft is only ``deepest`` tokens of the text's continuation, 0 for a plain
    step; what the stream was not given meanwhile it reads before its next draft.

    draft_threshold, verify_threshold: float64 [nodes], least path probability of the n-th node to
    be drafted from and to be verified; None: 0. nodes: trusted ones included. draft_accepted:
    abi.h's draft_accepted.
    """

    depth: int
    draft_threshold: np.ndarray | None = None
    verify_threshold: np.ndarray | None = None
    deepest: int | None = None
    draft_accepted: float = 1.0
    stream: bool = True


ENDS: int = abi.constant("STEPS_END")
"""Of `Following.by_match`."""


@dataclass(frozen=True)
class Following:
    """Steps that follow one in the same kernel call, without being asked for.

    by_match: int32, for each length of the text's match as it is told: how many tokens of its
    continuation are the draft; −1: the stream drafts; ENDS: the steps end before. tokens: steps
    follow until so many have been emitted, the first step's included, or one of `ends`. limit:
    tokens that may be emitted, less the one after a draft. depth, deepest: as Growth's, of the
    stream's drafts.
    """

    by_match: np.ndarray
    tokens: int
    limit: int
    depth: int = 0
    deepest: int = 0
    ends: Sequence[int] = ()


class FusedSteps:
    """Fused steps of one sequence at a time: ``begin`` a generation, ``enter`` a sequence, ``run``
    until it ends.

    stream: what drafts, at stream.gate, read with `head`; without one the text is looked up, and
    nothing else. refresh: whether accepted tokens run through it again (it has own K/V). limits:
    nodes, width, top, sharpness, least and the lookup's rates are kept; ``run`` sets the others.
    automaton: the text is looked up in its suffix automaton, for matches of any length; else its
    n-grams are. given: other texts that are looked up beside it. margin: greedy
    steps are verified with narrow weights first (lossy), and rows whose two best logits are less
    than this apart with the model's own; None: all with these. window: how many of the newest
    tokens the stream's own layer sees; None: all. Owns all buffers of a step.
    """

    @staticmethod
    def can_draft(nodes: int) -> bool:
        """Whether a fused step can have so many nodes: the kernel's arrays, and a tree's bits, end
        there.
        """
        return nodes <= MAX_TREE_NODES

    def __init__(
        self,
        decoder: NativeDecoder,
        stream: abi.CData,
        head: DraftHead | None,
        limits: abi.CData,
        refresh: bool,
        automaton: bool = False,
        given: GivenTexts | None = None,
        margin: float | None = None,
        window: int | None = None,
        staged: int = 0,
    ) -> None:
        d, self._drafted_nodes = decoder.info.hidden_size, limits.nodes
        nodes = limits.nodes + (limits.trust.nodes if limits.trust else 0)
        nodes = max(nodes, staged)
        self._library, self._window = library.kernel(), window
        self._decoder, self._nodes, self._refresh, self._entered = decoder, nodes, refresh, 0
        self._ahead, self._begun = 0, (0, 0)
        # steps in one call leave what they emit behind what waits
        room = CAUGHT_UP_WITHIN + 2 * (nodes + 1)
        self._ids, self._carried = (
            np.zeros(room, np.int64),
            torch.zeros(room, d, dtype=torch.float32, device="cpu"),
        )
        self._tokens, self._parents = np.empty(nodes, np.int64), np.empty(nodes, np.int32)
        self._confidence = np.empty(nodes)
        self._run: tuple[abi.CData, tuple[np.ndarray, ...]] | None = None
        self._learned: tuple[ContinuationRates | None, Calibration | None] = None, None
        self._unread = UnreadTokens()
        self._hidden = abi.floats_for(nodes + 1, d)
        self._features = abi.floats_for(nodes + 1, stream.tap_count, d)
        self._carries = any(
            linear.weight for linear in (stream.carry, stream.fuse_carried, stream.features)
        )
        heads = (
            limits.width * head.linear.outputs if head else 0,
            (nodes + 1) * decoder.head.outputs,
        )
        self._scratch = abi.floats_for((5 * (nodes + 1) + 2) * d + max(heads))
        verified = self._scratch[: (nodes + 1) * decoder.head.outputs]
        self._logits = verified.view(nodes + 1, -1)[:, : decoder.info.vocab_size]
        self._sampler: Sampler | None = None
        self._head, self._couple = head, True
        self._path, self._chosen = np.zeros(nodes + 1, np.int32), np.zeros(nodes + 1, np.int64)
        self._held: tuple[object, ...] = (stream, head)  # the kernel reads them by address
        self._free = np.zeros(nodes)
        self._no_threshold = abi.doubles(self._free)
        self._limits, self._longest = limits, limits.ngram.longest
        self._step = abi.new(
            "SpeculativeStep",
            stream=stream,
            draft_head=head.linear if head else None,
            head=decoder.head,
            screen=decoder.screen,
            draft_norm=(head and head.norm) or decoder.norm_address,
            norm=decoder.norm_address,
            token_map=head.token_map if head else None,
            exact_head=head.exact if head else None,
            ids=abi.longs(self._ids),
            carried=abi.tensor(self._carried),
            tokens=abi.longs(self._tokens),
            parents=abi.ints(self._parents),
            confidence=abi.doubles(self._confidence),
            hidden=abi.tensor(self._hidden),
            features=abi.tensor(self._features),
            scratch=abi.tensor(self._scratch),
            draft_vocab=head.vocab if head else 0,
            layers=decoder.info.num_layers,
        )
        self._text = KernelText(self._step, nodes + 1, automaton, given)
        self._narrow: tuple[NarrowWeights, abi.CData] | None = None
        self._margin = margin
        if margin is not None:
            self._verify_narrowly(margin)

    def _verify_narrowly(self, margin: float) -> None:
        weights = self._decoder.narrow()
        assert weights is not None
        d, taps = self._decoder.info.hidden_size, self._step.stream.tap_count
        rows = self._nodes + 1 + NARROW_PENDING
        buffers = abi.floats_for(rows, d), abi.floats_for(rows, taps, d)
        logits = abi.floats_for(rows, self._decoder.head.outputs)
        hidden, features = buffers
        narrow = weights.verifying(
            margin=margin,
            refresh=REFRESH,
            hidden=abi.tensor(hidden),
            features=abi.tensor(features),
            logits=abi.tensor(logits),
        )
        self._narrow = weights, narrow
        self._held = (*self._held, weights, buffers, logits, narrow)

    def begin(
        self,
        cache: NativeKVCache,
        own: NativeKVCache | None,
        sampler: Sampler | None = None,
        couple: bool = True,
        top: int | None = None,
        stages: bool = False,
    ) -> None:
        """A generation over ``cache``, with the stream's own layer's K/V in ``own``.

        sampler: chooses the tokens (its settings have no repetition penalty); None: greedy ones.
        couple: whether drafts are drawn with its noise; if not, they are the likeliest tokens.
        top: candidates of a node; None: as before. stages: whether steps are `run_ahead` and then
        settled.
        """
        if stages and self._narrow is None:
            self._verify_narrowly(0.0)
        self._cache, self._own = cache, own
        self._sampler = None if sampler is None or sampler.plain else sampler
        self._couple = couple
        if top is not None:
            self._limits.top = top
        self._step.refused = -np.inf
        if self._narrow is not None:
            weights, narrow = self._narrow
            weights.read_by(narrow, drawn=stages and self._sampler is not None)
        # of stages only `run_ahead` verifies with it, and nothing does in other generations
        self._let_narrow_verify(self._margin is not None)

    def _let_narrow_verify(self, does: bool) -> None:
        self._step.narrow = self._narrow[1] if does and self._narrow is not None else abi.NULL

    def enter(
        self,
        seq: int,
        ids: Sequence[int],
        carried: Tensor | None = None,
        text: Sequence[int] | None = None,
    ) -> None:
        """The sequence's next step refreshes all ``ids`` but the last. carried [len(ids), d], if
        any.
        text: all tokens so far, for drafts that look themselves up in it; None: these do not.
        """
        self._limits.ngram.longest = 0 if text is None else self._longest
        self._text.set([] if text is None else text)
        self._step.sequence = seq
        if self._narrow is not None:
            self._narrow[1].pending_count = 0
        self._entered, self._ahead = 1, 0
        self._ids[0] = ids[-1]
        self._unread.clear()
        if carried is not None:
            self._carried[0] = carried[-1]
        if self._refresh and len(ids) > 1:
            read = carried if self._carries else None
            self._unread.add(ids[:-1], None if read is None else read[:-1].clone())

    def run(self, growth: Growth) -> FusedStep:
        """One step. The accepted tokens' K/V are in place, uncommitted."""
        sampler = self._sampler
        bare = sampler is None or sampler.bare
        run = self._library.mr_speculative_step if bare else self._library.mr_speculative_draft
        length, emitted = self._call(run, growth)
        if sampler is not None and not bare:
            emitted = self._choose(sampler, length)
        if emitted < 0:
            raise UserError(NOT_FINITE)
        return self._ended(emitted)

    def _call(self, kernel: Callable[..., Any], growth: Growth) -> tuple[int, Any]:
        """One of the kernel's functions that draft, of the tokens that enter → how many have keys
        and values, and what it returned.
        """
        self._grow_caches()
        length, first = self._prepare(growth)
        _catch_up([self])
        entering, workspace = self._entered - first, self._decoder.workspace.address
        return length, kernel(workspace, self._step, length, first, entering, self._limits)

    def run_on(self, growth: Growth, following: Following) -> list[FusedStep]:
        """A step and those that follow it: of the first one's draft all is told. Tokens are chosen
        by argmax, of logits or of logits and noise.
        """
        if following.tokens <= 1:
            return [self.run(growth)]
        if self._refresh:
            self._take_back()
            many = self._entered > CAUGHT_UP_WITHIN and not growth.stream
            if self._unread and growth.stream:
                return [self.run(growth)]  # it catches up first
            if self._unread or many:
                self._set_aside(last=False)
        self._grow_caches(following.tokens)
        length, _ = self._prepare(growth, following.tokens)
        steps = self._told(following)
        emitted = self._library.mr_speculative_run(
            self._decoder.workspace.address, self._step, length, self._entered, self._limits, steps
        )
        if emitted < 0:
            raise UserError(NOT_FINITE)
        self._entered = steps.entering
        return self._done(steps)

    def _told(self, following: Following) -> abi.CData:
        """What the kernel is told of them, and their memory: for as long as it is the latest."""
        if self._run is None:
            nodes = self._nodes
            memory = np.empty(nodes, np.int64), np.empty(nodes, np.int32), np.empty(nodes)
            draft, parents, confidence = memory
            steps = abi.new(
                "Steps",
                waits=self._refresh,
                most=CAUGHT_UP_WITHIN,
                draft=abi.longs(draft),
                parents=abi.ints(parents),
                confidence=abi.doubles(confidence),
            )
            self._run = steps, memory
        steps, _ = self._run
        emitted = np.empty(following.tokens + self._nodes + 1, np.int64)
        ends = np.array(following.ends, np.int64)
        steps.by_match, steps.tokens = abi.ints(following.by_match), following.tokens
        steps.ends, steps.end_count = abi.longs(ends), len(ends)
        steps.limit, steps.depth, steps.deepest = (
            following.limit,
            following.depth,
            following.deepest,
        )
        steps.emitted, steps.streams = abi.longs(emitted), not self._unread
        self._following = following, ends, emitted  # the kernel reads them by address
        return steps

    def _done(self, steps: abi.CData) -> list[FusedStep]:
        _, _, emitted = self._following
        done, at, seconds = [], 0, self._step.draft_seconds
        tokens = emitted.tolist()
        for i in range(steps.count):
            one, end = steps.done[i], at + steps.done[i].emitted
            places = _places(one.unverified)
            done.append(
                FusedStep(tokens[at:end], one.drafted, one.levels, places, one.again, seconds)
            )
            at = end
        return done

    def run_ahead(self, growth: Growth, following: Following) -> list[FusedStep]:
        """Steps that the narrow copy verifies. Their tokens are drafts until `settle`."""
        self._note_begun()
        self._let_narrow_verify(True)
        try:
            done = self.run_on(growth, following)
        finally:
            self._let_narrow_verify(False)
        self._ahead += sum(len(step.tokens) for step in done)
        return done

    def _note_begun(self) -> None:
        """Of the first step ahead: the text's length, and the last token, to which `settle`
        returns.
        """
        if not self._ahead:
            self._begun = len(self._text), int(self._ids[self._entered - 1])

    def draft_behind(self, growth: Growth, nodes: int) -> Behind:
        """The stream's draft behind the tokens of the steps ahead, so many nodes at most. Nothing
        of it is verified.
        """
        self._note_begun()
        self._limits.nodes = min(nodes, self._drafted_nodes)
        self._call(self._library.mr_draft, growth)
        self._limits.nodes = self._drafted_nodes
        return self.draft()

    def settle(self, tokens: Sequence[int], behind: Behind = NOTHING) -> FusedStep:
        """The model's own weights verify the first tokens of the steps ahead, and a draft behind
        them, in one pass, as the draft of a step. `staged` at most.
        """
        step = self._step
        drafted, parents = with_behind(tokens, behind)
        count = len(drafted)
        self._note_begun()
        known, last = self._begun
        self._wait_from_committed()
        self._grow_caches()
        length = self._read_caches()
        self._text.cut(known)
        self._ids[0] = last
        self._tokens[:count], self._parents[:count] = drafted, parents
        self._take_noise()
        if self._narrow is not None:
            self._narrow[1].pending_count = 0
        emitted = self._library.mr_verify_draft(
            self._decoder.workspace.address,
            step,
            length,
            count,
            0,
            0,
            abi.NULL,
            abi.ints(self._path),
        )
        if emitted < 0:
            raise UserError(NOT_FINITE)
        self._text.forget_beyond(known + emitted - 1)  # the last one may not be that of the steps
        return self._ended(emitted)

    def _wait_from_committed(self) -> None:
        """Of steps ahead nothing is kept: what waits for the stream are committed tokens, and those
        that it has read beyond them it will read again.
        """
        kept = len(self._unread) + self._entered - self._ahead
        if self._refresh and kept > 0:
            self._set_aside()
            self._unread.keep(kept)
        else:
            self._unread.clear()
        self._ahead = 0

    def _prepare(self, growth: Growth, following: int = 0) -> tuple[int, int]:
        """The step's limits and noise; → committed tokens, and the first of `ids` that enters.
        following: tokens of this step and those that follow it in the same call; 0: none does.
        """
        limits, stream = self._limits, growth.stream
        limits.depth = growth.depth
        limits.deepest = growth.depth if growth.deepest is None else growth.deepest
        limits.ngram.draft_accepted = growth.draft_accepted
        draft_threshold, verify_threshold = (
            self._no_threshold if threshold is None else abi.doubles(threshold)
            for threshold in (growth.draft_threshold, growth.verify_threshold)
        )
        limits.draft_threshold, limits.verify_threshold = draft_threshold, verify_threshold
        limits.stream = stream
        length = self._read_caches(following)
        if self._refresh and not following:
            self._take_back() if stream else self._set_aside()
        self._take_noise()
        self._read = growth, draft_threshold, verify_threshold  # the kernel reads them by address
        return length, 0 if self._refresh and stream else self._entered - 1

    def _take_noise(self) -> None:
        """That of the token after the last one, and after those of the steps ahead."""
        sampler = self._sampler
        noise = None if sampler is None else sampler.noise(self._step.sequence, self._ahead)
        packed = abi.NULL if noise is None else abi.noise_of([noise])
        self._limits.noise = packed if self._couple else abi.NULL
        self._step.noise = packed
        self._noise = noise, packed  # the kernel reads them by address

    def _ended(self, emitted: int) -> FusedStep:
        """The step emitted so many tokens."""
        self._entered = emitted
        tokens = self._ids[:emitted].tolist()
        step = self._step
        return FusedStep(
            tokens,
            step.drafted,
            step.levels,
            _places(step.unverified),
            step.again,
            step.draft_seconds,
        )

    @property
    def refused(self) -> float:
        """The highest score since `begin` that was too low for trust; −inf: none was."""
        return float(self._step.refused)

    def trusted(self) -> set[int]:
        """The trusted nodes of the last draft."""
        mask = self._step.trusted
        if not mask:
            return set()
        return {node for node in range(1, self._step.drafted + 1) if mask >> (node - 1) & 1}

    def _choose(self, sampler: Sampler, length: int) -> int:
        """The sampler's tokens down the draft, of the rows that are reached; → how many. Their K/V
        move into place.
        """
        step = self._step
        tokens, parents = self.draft()
        descent = Descent(Draft(tokens, parents))
        chosen: list[int] = []
        while not chosen or descent.follow(chosen[-1]):
            row = self._logits[descent.path[-1]][None]
            chosen += sampler.choose(row, [step.sequence], [descent.drafted])
        count = len(chosen)
        self._path[:count], self._chosen[:count] = descent.path, chosen
        self._library.mr_speculative_accept(
            step, length, abi.ints(self._path), abi.longs(self._chosen), count
        )
        return count

    @property
    def behind(self) -> int:
        """Committed tokens that the stream's own layer has not read with their true residuals."""
        return len(self._unread) + self._entered - 1 if self._refresh else 0

    @property
    def unread(self) -> UnreadTokens:
        """These tokens, but for those that enter the stream next."""
        return self._unread

    def _set_aside(self, last: bool = True) -> None:
        """The tokens that would have entered the stream wait for its next draft; where not `last`,
        all but the last one.
        """
        count = self._entered if last else self._entered - 1
        carried = self._carried[:count].clone() if self._carries else None
        self._unread.add(self._ids[:count].tolist(), carried)
        if not last:
            self._ids[0], self._carried[0] = self._ids[count], self._carried[count].clone()
            self._entered = 1

    def _take_back(self) -> None:
        """Tokens that wait, where they are few, enter with the last ones: a pass of their own would
        read all weights of the stream again.
        """
        self._unread.keep_newest(self._window)
        count, entered = len(self._unread), self._entered
        if not count or count + entered > CAUGHT_UP_WITHIN + self._nodes + 1:
            return
        ids, carried = self._ids, self._carried
        ids[count : count + entered] = ids[:entered].copy()
        ids[:count] = self._unread.ids
        if self._carries:
            carried[count : count + entered] = carried[:entered].clone()
            torch.cat(self._unread.carried, out=carried[:count])
        self._entered = count + entered
        self._unread.clear()

    def learn_from(
        self, continuations: ContinuationRates, calibration: Calibration | None = None
    ) -> None:
        """From now on drafts follow the text by these rates, and believe their confidence as far
        as `calibration` says; None: entirely.
        """
        self._learned = continuations, calibration  # the kernel reads them by address
        ngram = self._limits.ngram
        ngram.first_accepted = abi.doubles(continuations.first_accepted)
        ngram.first_against = abi.doubles(continuations.first_against)
        ngram.next_accepted = abi.doubles(continuations.next_accepted)
        for name in ("tries", "hits"):
            counts = None if calibration is None else getattr(calibration, name)
            setattr(self._limits, name, abi.NULL if counts is None else abi.doubles(counts))

    def copied(self, most: int, by_match: np.ndarray) -> list[int] | None:
        """What a step that nobody chooses for copies of the text, so many tokens at most; None: the
        stream drafts. by_match: as Following's; what would end the steps is copied whole.
        """
        tokens, matched = self.look_up(most) if self._limits.ngram.longest else ([], 0)
        count = int(by_match[matched])
        if count == ENDS:
            return tokens
        return tokens[:count] if count >= 0 else None

    def look_up(self, most: int) -> tuple[list[int], int]:
        """What the text had after the tokens it ends in, as `TextSource.look_up`."""
        return self._text.look_up(self._limits.ngram.longest, most)

    def confidence(self) -> list[float]:
        """The stream's own probability of each node of the last draft; −1: not its node."""
        return self._confidence[: self._step.drafted].tolist()

    def best(self) -> tuple[int, float] | None:
        """The stream's best token after the last one, and its confidence; None: it did not run."""
        step = self._step
        return None if step.best < 0 else (step.best, step.best_probability)

    def measured(
        self,
        plain: CostModel,
        own: Callable[[NativeKVCache], NativeKVCache | None],
        repeats: int = 40,
        budget_seconds: float = 0.2,
    ) -> CostModel:
        """``plain`` with the draft's costs as they are inside a fused step, of many levels and of
        one (a level alone misses that draft and verification push each other out of the caches).
        Uses caches of its own, the stream's made by ``own``; not during a generation. At least two
        repeats, however long they take.
        """
        most, length = min(self._nodes, 6), 40
        cache = self._decoder.new_cache(1, length + self._nodes + 1)
        cache.commit(0, length)
        self.begin(cache, own(cache))
        taken: dict[int, list[float]] = {1: [], most: []}
        deadline = time.perf_counter() + budget_seconds
        for repeat in range(repeats):
            if repeat >= 2 and time.perf_counter() > deadline:
                break
            for depth in taken:
                self.enter(0, [0])
                self._limits.nodes = depth
                self.run(Growth(depth))
                taken[depth].append(self._step.draft_seconds)
        self._limits.nodes = self._drafted_nodes
        # the least: drafts that look dearer than they are may never be tried, and so never timed;
        # ones that look cheaper are, and the controller learns what they take
        one, many = (min(taken[depth][1:]) for depth in (1, most))
        level = max(many - one, 0.0) / max(most - 1, 1)
        fixed = max(one - level, 0.0)
        costs = replace(plain.costs, draft_step=level, draft_fixed=fixed)
        return replace(plain, costs=costs)

    def origin(self) -> tuple[Origin, int, int]:
        """Where the last step's draft came from, and how much of either kind was accepted."""
        step, text = self._step, self._step.text
        origin = Origin(text.drafted, text.continued, text.matched)
        return origin, step.accepted_drafted, step.accepted_continued

    def draft(self) -> tuple[list[int], list[int]]:
        """The last step's draft: the tokens of nodes 1, 2, … and their parents (0: the last token
        before it).
        """
        count = self._step.drafted
        return self._tokens[:count].tolist(), self._parents[:count].tolist()

    @property
    def _length(self) -> int:
        """Tokens with keys and values: the committed ones, and those of narrow steps since."""
        return int(self._cache.lengths[self._step.sequence]) + self._ahead

    def _grow_caches(self, following: int = 0) -> None:
        """Room for a step in both caches, which may move them: for all sequences that use them."""
        length = self._length
        for store in (self._cache, self._own):
            if store is not None:
                store.make_room_to(length + following + self._nodes)

    def _read_caches(self, following: int = 0) -> int:
        """The step is told where the caches are; → the sequence's committed length."""
        cache, own, step = self._cache, self._own, self._step
        step.caches, step.capacity = cache.address, cache.capacity
        self._text.make_room(following)
        if own is not None:
            step.block_cache, step.block_capacity = own.address, own.capacity
        return self._length


def _places(bits: int) -> frozenset[int]:
    """The numbers of the bits that are set."""
    return frozenset(n for n in range(bits.bit_length()) if bits >> n & 1)


def run_together(every: Sequence[FusedSteps], growths: Sequence[Growth]) -> list[FusedStep]:
    """A step of each of several sequences that were made alike, as `FusedSteps.run`: a level of all
    drafts is one pass, and so is their verification. Of more than one only where tokens are chosen
    by argmax, of logits or of logits and noise. All but a single one verify with the model's own
    weights.
    """
    if len(every) == 1:
        return [every[0].run(growths[0])]
    # for the kernel: those whose stream drafts come first
    order = sorted(range(len(every)), key=lambda i: not growths[i].stream)
    those = [every[i] for i in order]
    for one in those:
        one._grow_caches()
    lengths, first = zip(*(every[i]._prepare(growths[i]) for i in order), strict=True)
    _catch_up(those)
    steps = abi.ffi.new("SpeculativeStep *[]", [one._step for one in those])
    limits = abi.ffi.new("DraftLimits *[]", [one._limits for one in those])
    emitted = np.empty(len(those), np.int32)
    entering = [one._entered - begin for one, begin in zip(those, first, strict=True)]
    arrays = [np.array(numbers, np.int32) for numbers in (lengths, first, entering)]
    finite = library.kernel().mr_speculative_steps(
        those[0]._decoder.workspace.address,
        steps,
        len(those),
        *map(abi.ints, arrays),
        limits,
        abi.ints(emitted),
    )
    if not finite:
        raise UserError(NOT_FINITE)
    done = dict(
        zip(
            order,
            (one._ended(n) for one, n in zip(those, emitted.tolist(), strict=True)),
            strict=True,
        )
    )
    return [done[i] for i in range(len(every))]


def _catch_up(every: Sequence[FusedSteps]) -> None:
    """Tokens that wait for a stream that drafts now, more than enter with its draft, run through
    it; only its own K/V are written.
    """
    behind = [one for one in every if one._unread and one._limits.stream]
    if not behind:
        return
    for one in behind:  # what the stream's own layer will not see
        one._unread.keep_newest(one._window)
    first = behind[0]
    ids = np.array([token for one in behind for token in one._unread.ids], np.int64)
    pieces = [piece for one in behind for piece in one._unread.carried]
    carried = torch.cat(pieces).contiguous() if pieces else None
    rows = Rows.concat(
        [
            Rows.causal(
                one._step.sequence,
                one._length - one._entered + 1 - len(one._unread),
                len(one._unread),
            )
            for one in behind
        ]
    )
    x = abi.floats_for(len(ids), first._decoder.info.hidden_size)
    step = first._step
    first._library.mr_stream_step(
        first._decoder.workspace.address,
        step.stream,
        step.caches,
        step.block_cache,
        step.block_capacity,
        abi.rows_of(rows, first._cache.capacity),
        0,
        abi.longs(ids),
        abi.tensor(carried),
        abi.tensor(x),
    )
    for one in behind:
        one._unread.clear()
