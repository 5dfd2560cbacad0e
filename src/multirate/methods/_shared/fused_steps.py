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

import numpy as np
import torch
from torch import Tensor

from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.acceptance import Descent
from multirate.decoding.speculate.acceptance_statistics import (
    Calibration,
    ContinuationRates,
    Origin,
)
from multirate.decoding.speculate.budget import CAUGHT_UP_WITHIN
from multirate.decoding.speculate.costs import CostModel
from multirate.decoding.speculate.drafter import MAX_TREE_NODES, Draft, FusedStep
from multirate.decoding.speculate.given_texts import GivenTexts
from multirate.errors import UserError
from multirate.methods._shared.draft_head import DraftHead
from multirate.methods._shared.kernel_text import KernelText
from multirate.methods._shared.waiting_tokens import UnreadTokens
from multirate.runtime.native import NativeDecoder, abi, library
from multirate.runtime.native.cache import NativeKVCache
from multirate.runtime.noise import NOT_FINITE
from multirate.runtime.rows import Rows


@dataclass(frozen=True)
class Growth:
    """How a step drafts: at most ``depth`` levels, and continuations of ``deepest`` tokens (None:
    as many).

    stream: False: a draft is only ``deepest`` tokens of the text's continuation, 0 for a plain
    step; what the stream was not given meanwhile it reads before its next draft.

    draft_threshold, verify_threshold: float64 [nodes], least path probability of the n-th node to
    be drafted from and to be verified; None: 0. nodes: trusted ones included. draft_accepted:
    speculate.h's draft_accepted.
    """

    depth: int
    draft_threshold: np.ndarray | None = None
    verify_threshold: np.ndarray | None = None
    deepest: int | None = None
    draft_accepted: float = 1.0
    stream: bool = True


class FusedSteps:
    """Fused steps of one sequence at a time: ``begin`` a generation, ``enter`` a sequence, ``run``
    until it ends.

    stream: what drafts, at stream.gate, read with `head`; without one the text is looked up, and
    nothing else. refresh: whether accepted tokens run through it again (it has own K/V). limits:
    nodes, width, top, sharpness, least and the lookup's rates are kept; ``run`` sets the others.
    automaton: the text is looked up in its suffix automaton, for matches of any length; else its
    n-grams are. given: other texts that are looked up beside it. window: how many of the newest
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
        window: int | None = None,
    ) -> None:
        d, self._drafted_nodes = decoder.info.hidden_size, limits.nodes
        nodes = limits.nodes + (limits.trust.nodes if limits.trust else 0)
        self._library, self._window = library.kernel(), window
        self._decoder, self._nodes, self._refresh, self._entered = decoder, nodes, refresh, 0
        room = CAUGHT_UP_WITHIN + nodes + 1
        self._ids, self._carried = (
            np.zeros(room, np.int64),
            torch.zeros(room, d, dtype=torch.float32, device="cpu"),
        )
        self._tokens, self._parents = np.empty(nodes, np.int64), np.empty(nodes, np.int32)
        self._confidence = np.empty(nodes)
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
        self._head = head
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

    def begin(
        self,
        cache: NativeKVCache,
        own: NativeKVCache | None,
        sampler: Sampler | None = None,
    ) -> None:
        """A generation over ``cache``, with the stream's own layer's K/V in ``own``.

        sampler: chooses the tokens (its settings have no repetition penalty); None: greedy ones.
        """
        self._cache, self._own = cache, own
        self._sampler = None if sampler is None or sampler.plain else sampler
        self._step.refused = -np.inf

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
        self._entered = 1
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
        self._grow_caches()
        length, first = self._prepare(growth)
        _catch_up([self])
        entering, workspace = self._entered - first, self._decoder.workspace.address
        emitted = run(workspace, self._step, length, first, entering, self._limits)
        if sampler is not None and not bare:
            emitted = self._choose(sampler, length)
        if emitted < 0:
            raise UserError(NOT_FINITE)
        return self._ended(emitted)

    def _prepare(self, growth: Growth) -> tuple[int, int]:
        """The step's limits and noise; → committed tokens, and the first of `ids` that enters."""
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
        length = self._read_caches()
        if self._refresh:
            self._take_back() if stream else self._set_aside()
        self._take_noise()
        self._read = growth, draft_threshold, verify_threshold  # the kernel reads them by address
        return length, 0 if self._refresh and stream else self._entered - 1

    def _take_noise(self) -> None:
        """That of the token after the last one."""
        sampler = self._sampler
        noise = None if sampler is None else sampler.noise(self._step.sequence)
        packed = abi.NULL if noise is None else abi.noise_of([noise])
        self._limits.noise = packed
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

    def _set_aside(self) -> None:
        """The tokens that would have entered the stream wait for its next draft."""
        carried = self._carried[: self._entered].clone() if self._carries else None
        self._unread.add(self._ids[: self._entered].tolist(), carried)

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
        """Committed tokens."""
        return int(self._cache.lengths[self._step.sequence])

    def _grow_caches(self) -> None:
        """Room for a step in both caches, which may move them: for all sequences that use them."""
        length = self._length
        for store in (self._cache, self._own):
            if store is not None:
                store.make_room_to(length + self._nodes)

    def _read_caches(self) -> int:
        """The step is told where the caches are; → the sequence's committed length."""
        cache, own, step = self._cache, self._own, self._step
        step.caches, step.capacity = cache.address, cache.capacity
        self._text.make_room()
        if own is not None:
            step.block_cache, step.block_capacity = own.address, own.capacity
        return self._length


def _places(bits: int) -> frozenset[int]:
    """The numbers of the bits that are set."""
    return frozenset(n for n in range(bits.bit_length()) if bits >> n & 1)


def run_together(every: Sequence[FusedSteps], growths: Sequence[Growth]) -> list[FusedStep]:
    """A step of each of several sequences that were made alike, as `FusedSteps.run`: a level of all
    drafts is one pass, and so is their verification. Of more than one only where tokens are chosen
    by argmax, of logits or of logits and noise.
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
