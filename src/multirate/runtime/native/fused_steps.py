"""Fused steps of one sequence in the kernel: draft, verification and acceptance in one call from
Python, greedily and at a temperature. With top-k, top-p or min-p in two, between which the sampler
chooses the tokens.

The state between two steps is what the kernel leaves: the tokens it emitted and h_L (or what the
stream reads instead) of the accepted path, which are the tokens to refresh (all but the last one,
which enters next) and their carried residuals.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from multirate.errors import UserError
from multirate.runtime.fused import (
    CAUGHT_UP_WITHIN,
    ChoosePath,
    ConfidenceCounts,
    DraftedNodes,
    DraftShape,
    FusedStep,
    Growth,
    Lookups,
    TextRates,
    TokenChooser,
    UnreadTokens,
)
from multirate.runtime.native import abi, library
from multirate.runtime.native.cache import NativeKVCache
from multirate.runtime.native.draft_head import DraftHead
from multirate.runtime.native.kernel_text import KernelText
from multirate.runtime.noise import NOT_FINITE
from multirate.runtime.rows import Rows

if TYPE_CHECKING:
    from multirate.runtime.native.decoder import NativeDecoder

_MEASURED_LEVELS = 6  # of the longer of two measured drafts


class FusedSteps:
    """Fused steps of one sequence at a time: ``begin`` a generation, ``enter`` a sequence, ``run``
    until it ends.

    stream: what drafts, read with `head`; without one the text is looked up, and nothing else.
    window: how many of the newest tokens the stream's own layer sees; None: all. trust: of
    `shape.unverified`. Owns all buffers of a step.
    """

    def __init__(
        self,
        decoder: NativeDecoder,
        stream: abi.CData,
        head: DraftHead | None,
        shape: DraftShape,
        lookups: Lookups,
        window: int | None = None,
        trust: abi.CData | None = None,
    ) -> None:
        self.limits = abi.new(
            "DraftLimits",
            nodes=shape.nodes,
            width=shape.width,
            top=shape.candidates,
            sharpness=shape.sharpness,
            min_probability=shape.min_probability,
            trust=trust,
            ngram=abi.new("NgramLimits", longest=lookups.longest),
        )
        self._longest, refresh = lookups.longest, shape.refresh
        d, self._drafted_nodes = decoder.info.hidden_size, shape.nodes
        nodes = shape.nodes + (shape.unverified.nodes if shape.unverified else 0)
        self._library, self.window = library.kernel(), window
        self.decoder, self._nodes, self._refresh, self.entered = decoder, nodes, refresh, 0
        room = CAUGHT_UP_WITHIN + nodes + 1
        self._ids, self._carried = (
            np.zeros(room, np.int64),
            torch.zeros(room, d, dtype=torch.float32, device="cpu"),
        )
        self._tokens, self._parents = np.empty(nodes, np.int64), np.empty(nodes, np.int32)
        self._confidence = np.empty(nodes)
        self._learned: tuple[TextRates | None, ConfidenceCounts | None] = None, None
        self.unread = UnreadTokens()
        self._hidden = abi.floats_for(nodes + 1, d)
        self._features = abi.floats_for(nodes + 1, stream.tap_count, d)
        self._carries = any(
            linear.weight for linear in (stream.carry, stream.fuse_carried, stream.features)
        )
        heads = (
            shape.width * head.linear.outputs if head else 0,
            (nodes + 1) * decoder.head.outputs,
        )
        self._scratch = abi.floats_for((5 * (nodes + 1) + 2) * d + max(heads))
        verified = self._scratch[: (nodes + 1) * decoder.head.outputs]
        self._logits = verified.view(nodes + 1, -1)[:, : decoder.info.vocab_size]
        self._chooser: TokenChooser | None = None
        self._choose_path: ChoosePath | None = None
        # the kernel reads them by address
        self._held: tuple[object, ...] = (stream, head, trust)
        self._free = np.zeros(nodes)
        self._no_threshold = abi.doubles(self._free)
        self.step = abi.new(
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
        self._text = KernelText(self.step, nodes + 1, lookups)

    def begin(
        self,
        cache: NativeKVCache,
        own: NativeKVCache | None,
        chooser: TokenChooser | None = None,
        choose_path: ChoosePath | None = None,
    ) -> None:
        """A generation over ``cache``, with the stream's own layer's K/V in ``own``.

        chooser: of the tokens (without a repetition penalty); None: greedy ones.
        """
        self.cache, self._own = cache, own
        self._chooser = None if chooser is None or chooser.plain else chooser
        self._choose_path = choose_path
        self.step.refused = -np.inf

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
        self.limits.ngram.longest = 0 if text is None else self._longest
        self._text.set([] if text is None else text)
        self.step.sequence = seq
        self.entered = 1
        self._ids[0] = ids[-1]
        self.unread.clear()
        if carried is not None:
            self._carried[0] = carried[-1]
        if self._refresh and len(ids) > 1:
            read = carried if self._carries else None
            self.unread.add(ids[:-1], None if read is None else read[:-1].clone())

    def run(self, growth: Growth) -> FusedStep:
        """One step. The accepted tokens' K/V are in place, uncommitted."""
        bare = self._chooser is None or self._chooser.bare
        run = self._library.mr_speculative_step if bare else self._library.mr_speculative_draft
        self.grow_caches()
        length, first = self.prepare(growth)
        catch_up([self])
        entering, workspace = self.entered - first, self.decoder.workspace.address
        emitted = run(workspace, self.step, length, first, entering, self.limits)
        if not bare:
            emitted = self._accept_chosen(length)
        if emitted < 0:
            raise UserError(NOT_FINITE)
        return self.ended(emitted)

    def prepare(self, growth: Growth) -> tuple[int, int]:
        """The step's limits and noise; → committed tokens, and the first of `ids` that enters."""
        limits, stream = self.limits, growth.stream
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
        return length, 0 if self._refresh and stream else self.entered - 1

    def _take_noise(self) -> None:
        """That of the token after the last one."""
        chooser = self._chooser
        noise = None if chooser is None else chooser.noise(self.step.sequence)
        packed = abi.NULL if noise is None else abi.noise_of([noise])
        self.limits.noise = packed
        self.step.noise = packed
        self._noise = noise, packed  # the kernel reads them by address

    def ended(self, emitted: int) -> FusedStep:
        """The step emitted so many tokens."""
        self.entered = emitted
        tokens = self._ids[:emitted].tolist()
        step = self.step
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
        return float(self.step.refused)

    def _accept_chosen(self, length: int) -> int:
        """The caller's tokens down the draft; → how many. Their K/V move into place."""
        step = self.step
        assert self._choose_path is not None
        count = step.drafted
        path, chosen = self._choose_path(
            self._logits[: count + 1],
            step.sequence,
            self._tokens[:count].tolist(),
            self._parents[:count].tolist(),
        )
        nodes, tokens = np.array(path, np.int32), np.array(chosen, np.int64)
        self._library.mr_speculative_accept(
            step, length, abi.ints(nodes), abi.longs(tokens), len(tokens)
        )
        return len(tokens)

    def nodes(self) -> DraftedNodes:
        """The last step's draft."""
        step, text = self.step, self.step.text
        count, mask = step.drafted, step.trusted
        return DraftedNodes(
            self._tokens[:count].tolist(),
            self._parents[:count].tolist(),
            self._confidence[:count].tolist(),
            {node + 1 for node in _places(mask) if node < count} if mask else set(),
            None if step.best < 0 else (step.best, step.best_probability),
            text.drafted,
            text.continued,
            text.matched,
        )

    @property
    def behind(self) -> int:
        """Committed tokens that the stream's own layer has not read with their true residuals."""
        return len(self.unread) + self.entered - 1 if self._refresh else 0

    def _set_aside(self) -> None:
        """The tokens that would have entered the stream wait for its next draft."""
        carried = self._carried[: self.entered].clone() if self._carries else None
        self.unread.add(self._ids[: self.entered].tolist(), carried)

    def _take_back(self) -> None:
        """Tokens that wait, where they are few, enter with the last ones: a pass of their own would
        read all weights of the stream again.
        """
        self.unread.keep_newest(self.window)
        count, entered = len(self.unread), self.entered
        if not count or count + entered > CAUGHT_UP_WITHIN + self._nodes + 1:
            return
        ids, carried = self._ids, self._carried
        ids[count : count + entered] = ids[:entered].copy()
        ids[:count] = self.unread.ids
        if self._carries:
            carried[count : count + entered] = carried[:entered].clone()
            torch.cat(self.unread.carried, out=carried[:count])
        self.entered = count + entered
        self.unread.clear()

    def learn_from(
        self, rates: TextRates | None, calibration: ConfidenceCounts | None = None
    ) -> None:
        """From now on drafts follow the text by these rates, and believe their confidence as far
        as `calibration` says; None: entirely.
        """
        self._learned = rates, calibration  # the kernel reads them by address
        if rates is not None:
            ngram = self.limits.ngram
            ngram.first_accepted = abi.doubles(rates.first_accepted)
            ngram.first_against = abi.doubles(rates.first_against)
            ngram.next_accepted = abi.doubles(rates.next_accepted)
        for name in ("tries", "hits"):
            counts = None if calibration is None else getattr(calibration, name)
            setattr(self.limits, name, abi.NULL if counts is None else abi.doubles(counts))

    def look_up(self, most: int) -> tuple[list[int], int]:
        """What the text had after the tokens it ends in, as `TextSource.look_up`."""
        return self._text.look_up(self.limits.ngram.longest, most)

    def draft_costs(
        self, cache: NativeKVCache, own: NativeKVCache | None, repeats: int = 40
    ) -> tuple[float, float]:
        """See `FusedSequences.draft_costs`: drafts of many levels and of one, over caches of their
        own (a level alone misses that draft and verification push each other out of the processor's
        caches). At least two repeats, however long they take.
        """
        most = min(self._nodes, _MEASURED_LEVELS)
        self.begin(cache, own)
        taken: dict[int, list[float]] = {1: [], most: []}
        deadline = time.perf_counter() + 0.2
        for repeat in range(repeats):
            if repeat >= 2 and time.perf_counter() > deadline:
                break
            for depth in taken:
                self.enter(0, [0])
                self.limits.nodes = depth
                self.run(Growth(depth))
                taken[depth].append(self.step.draft_seconds)
        self.limits.nodes = self._drafted_nodes
        # the least: drafts that look dearer than they are may never be tried, and so never timed;
        # ones that look cheaper are, and the budget policy learns what they take
        one, many = (min(taken[depth][1:]) for depth in (1, most))
        level = max(many - one, 0.0) / max(most - 1, 1)
        return max(one - level, 0.0), level

    @property
    def slots(self) -> int:
        """Cache slots that a step may write."""
        return self._nodes + 1

    @property
    def length(self) -> int:
        """Committed tokens."""
        return int(self.cache.lengths[self.step.sequence])

    def grow_caches(self) -> None:
        """Room for a step in both caches, which may move them: for all sequences that use them."""
        length = self.length
        for store in (self.cache, self._own):
            if store is not None:
                store.make_room_to(length + self._nodes)

    def _read_caches(self) -> int:
        """The step is told where the caches are; → the sequence's committed length."""
        cache, own, step = self.cache, self._own, self.step
        step.caches, step.capacity = cache.address, cache.capacity
        self._text.make_room()
        if own is not None:
            step.block_cache, step.block_capacity = own.address, own.capacity
        return self.length


def _places(bits: int) -> frozenset[int]:
    """The numbers of the bits that are set."""
    return frozenset(n for n in range(bits.bit_length()) if bits >> n & 1)


def catch_up(every: Sequence[FusedSteps]) -> None:
    """Tokens that wait for a stream that drafts now, more than enter with its draft, run through
    it; only its own K/V are written.
    """
    behind = [one for one in every if one.unread and one.limits.stream]
    if not behind:
        return
    for one in behind:  # what the stream's own layer will not see
        one.unread.keep_newest(one.window)
    first = behind[0]
    ids = np.array([token for one in behind for token in one.unread.ids], np.int64)
    pieces = [piece for one in behind for piece in one.unread.carried]
    carried = torch.cat(pieces).contiguous() if pieces else None
    rows = Rows.concat(
        [
            Rows.causal(
                one.step.sequence,
                one.length - one.entered + 1 - len(one.unread),
                len(one.unread),
            )
            for one in behind
        ]
    )
    x = abi.floats_for(len(ids), first.decoder.info.hidden_size)
    step = first.step
    library.kernel().mr_stream_step(
        first.decoder.workspace.address,
        step.stream,
        step.caches,
        step.block_cache,
        step.block_capacity,
        abi.rows_of(rows, first.cache.capacity),
        0,
        abi.longs(ids),
        abi.tensor(carried),
        abi.tensor(x),
    )
    for one in behind:
        one.unread.clear()
