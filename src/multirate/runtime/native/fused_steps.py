"""Fused steps in the kernel: draft, verification and acceptance of all sequences in one call from
Python, greedily and at a temperature. With top-k, top-p or min-p in two, between which the sampler
chooses the tokens.

The state between two steps is what the kernel leaves: the tokens it emitted and h_L (or what the
branch reads instead) of the accepted path, which are the tokens to refresh (all but the last one,
which enters next) and their carried residuals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
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
)
from multirate.runtime.native import abi, library
from multirate.runtime.native.cache import NativeKVCache
from multirate.runtime.native.draft_head import DraftHead
from multirate.runtime.native.kernel_text import KernelText
from multirate.runtime.native.unread_tokens import UnreadTokens
from multirate.runtime.noise import NOT_FINITE
from multirate.runtime.rows import Rows

if TYPE_CHECKING:
    from multirate.runtime.native.decoder import NativeDecoder

_NONE = frozenset[int]()
_MOST_ENTERING = abi.constant("MAX_ROWS") - 1  # tokens of a level whose last one has two rows


class FusedSteps:
    """Fused steps of one sequence at a time: ``begin`` a generation, ``enter`` a sequence, then
    `run_together` until it ends.

    branch: what drafts, read with `head`; without one the text is looked up, and nothing else.
    window: how many of the newest tokens the branch's own layer sees; None: all. rule: of
    `shape.unverified`. Owns all buffers of a step.
    """

    def __init__(
        self,
        decoder: NativeDecoder,
        branch: abi.CData,
        head: DraftHead | None,
        shape: DraftShape,
        lookups: Lookups,
        window: int | None = None,
        rule: abi.CData | None = None,
    ) -> None:
        self.limits = abi.new(
            "DraftLimits",
            nodes=shape.nodes,
            width=shape.width,
            top=shape.candidates,
            sharpness=shape.sharpness,
            min_probability=shape.min_probability,
            rule=rule,
            ngram=abi.new("NgramLimits", longest=lookups.longest),
        )
        self._longest, backfill = lookups.longest, shape.backfill
        d = decoder.info.hidden_size
        nodes = shape.nodes + (shape.unverified.nodes if shape.unverified else 0)
        self.decoder, self.capacity, self._backfill, self.entered = decoder, nodes, backfill, 0
        room = CAUGHT_UP_WITHIN + nodes + 1
        self._ids = np.zeros(room, np.int64)
        self._carried = torch.zeros(room, d, dtype=torch.float32, device="cpu")
        self._carried_array = self._carried.numpy()
        self._tokens, self._parents = np.empty(nodes, np.int64), np.empty(nodes, np.int32)
        self._confidence = np.empty(nodes)
        self._learned: tuple[TextRates | None, ConfidenceCounts | None] = None, None
        self._hidden = abi.floats_for(nodes + 1, d)
        self._features = abi.floats_for(nodes + 1, branch.tap_count, d)
        self._carries = any(
            linear.weight for linear in (branch.carry, branch.fuse_carried, branch.features)
        )
        self.unread = UnreadTokens(d if self._carries else 0, window)
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
        self._held: tuple[object, ...] = (branch, head, rule)
        self._no_threshold = np.zeros(nodes)
        self._thresholds: list[NDArray[np.float64] | None] = [None, None]
        self._not_greedy = True
        self._growth: Growth | None = None
        self._cache_versions: tuple[int, int] | None = None
        self.step = abi.new(
            "SpeculativeStep",
            branch=branch,
            draft_head=head.linear if head else None,
            head=decoder.head,
            screen=decoder.screen,
            draft_norm=(head and head.norm) or decoder.norm_address,
            norm=decoder.norm_address,
            token_map=head.token_map if head else None,
            exact_head=head.exact if head else None,
            limits=self.limits,
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
        """A generation over ``cache``, with the branch's own layer's K/V in ``own``.

        chooser: of the tokens; None: greedy ones.
        """
        self.cache, self._own, self._cache_versions = cache, own, None
        self._chooser, self._not_greedy = chooser, True
        self._choose_path = choose_path
        self.step.highest_rejected = -np.inf

    def enter(
        self,
        seq: int,
        ids: Sequence[int],
        carried: Tensor | None = None,
        text: Sequence[int] | None = None,
    ) -> None:
        """The sequence's next step backfills all ``ids`` but the last.

        carried: [len(ids), d], if any. text: all tokens so far, to look drafts up in; None: drafts
            are not looked up.
        """
        self.limits.ngram.longest = 0 if text is None else self._longest
        self._text.set([] if text is None else text)
        self.step.sequence, self._not_greedy = seq, True
        self.entered = 1
        self._ids[0] = ids[-1]
        self.unread.clear()
        if carried is not None:
            self._carried[0] = carried[-1]
        if self._backfill and len(ids) > 1:
            assert carried is not None
            self.unread.add(np.array(ids[:-1]), carried[:-1].numpy())

    def prepare(self, growth: Growth, greedy: bool) -> None:
        """The step's limits, caches and noise, and what enters. greedy: whether no sequence of the
        step has noise or draws its tokens.
        """
        if growth is not self._growth:  # the same object: nothing has changed
            self._grow_by(growth)
        self._read_caches()
        first = self.entered - 1
        if self._backfill:
            if growth.own:
                self._take_back()
                first = 0
            else:
                self._set_aside(self.entered)
        if self._not_greedy or not greedy:
            self._take_noise()
        self.step.first, self.step.backfill = first, self.entered - 1 - first

    def _grow_by(self, growth: Growth) -> None:
        limits = self.limits
        limits.depth = growth.depth
        limits.deepest = growth.depth if growth.deepest is None else growth.deepest
        limits.ngram.draft_accepted = growth.draft_accepted
        limits.own = growth.own
        self._take_thresholds(growth.draft_threshold, growth.verify_threshold)
        forced = None if growth.forced is None else np.array(growth.forced, np.int64)
        self.step.forced = abi.NULL if forced is None else abi.longs(forced)
        self._growth, self._forced = growth, forced  # the kernel reads them by address

    def _take_thresholds(self, *thresholds: NDArray[np.float64] | None) -> None:
        """Those of drafting and of verifying; they seldom change."""
        for i, threshold in enumerate(thresholds):
            if threshold is None:
                threshold = self._no_threshold
            if threshold is self._thresholds[i]:
                continue
            self._thresholds[i] = threshold  # the kernel reads it by address
            if i:
                self.limits.verify_threshold = abi.doubles(threshold)
            else:
                self.limits.draft_threshold = abi.doubles(threshold)

    def greedy(self, every: Sequence[FusedSteps]) -> bool:
        """Whether all tokens of these sequences are the argmax of logits without noise."""
        seqs = [one.step.sequence for one in every]
        chooser = self._chooser
        return chooser is None or (
            chooser.by_argmax(seqs) and chooser.noises(seqs, [0] * len(seqs)) is None
        )

    def _take_noise(self) -> None:
        """That of the token after the last one."""
        chooser, step = self._chooser, self.step
        noise = None if chooser is None else chooser.noises([step.sequence], [0])
        packed = abi.NULL if noise is None else abi.noise_of(noise)
        step.chooses = chooser is None or chooser.by_argmax([step.sequence])
        self._not_greedy = noise is not None or not step.chooses
        self.limits.noise = step.noise = packed
        self._noise = noise, packed  # the kernel reads them by address

    def ended(self) -> FusedStep:
        """What the step did. The accepted tokens' K/V are in place, uncommitted."""
        step = self.step
        self.entered, drafted = step.emitted, step.drafted
        unverified = step.unverified_tokens
        return FusedStep(
            self._ids[: self.entered].tolist(),
            drafted,
            step.levels,
            drafted - step.text.continued,
            _places(unverified) if unverified else _NONE,
            step.draft_seconds,
        )

    def accept_chosen(self) -> None:
        """The caller's tokens down the draft. Their K/V move into place."""
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
        step.emitted = len(tokens)
        library.kernel().mr_speculative_accept(
            step, abi.ints(nodes), abi.longs(tokens), len(tokens)
        )

    def nodes(self) -> DraftedNodes:
        """The last step's draft."""
        step, text = self.step, self.step.text
        count, mask = step.drafted, step.unverified_nodes
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
        """Committed tokens that the branch's own layer has not read with their true residuals."""
        return len(self.unread) + self.entered - 1 if self._backfill else 0

    def _set_aside(self, count: int) -> None:
        """So many tokens that would have entered the branch wait for its next draft."""
        self.unread.add(self._ids[:count], self._carried_array[:count])

    def _take_back(self) -> None:
        """Tokens that wait, where they are few, enter with the last ones: a pass of their own would
        read all weights of the branch again. Where the last ones are too many, all but one wait.
        """
        self.unread.keep_seen()
        count, entered = len(self.unread), self.entered
        if entered > _MOST_ENTERING:
            self._set_aside(entered - 1)
            self._ids[0], self._carried[0] = self._ids[entered - 1], self._carried[entered - 1]
            self.entered = 1
            return
        room = min(CAUGHT_UP_WITHIN + self.capacity + 1, _MOST_ENTERING)
        if not count or count + entered > room:
            return
        ids, carried = self._ids, self._carried_array
        ids[count : count + entered] = ids[:entered].copy()
        ids[:count] = self.unread.ids
        if self._carries:
            carried[count : count + entered] = carried[:entered].copy()
            carried[:count] = self.unread.carried
        self.entered = count + entered
        self.unread.clear()

    def settle(self) -> None:
        """All tokens but the last, which enters next, run through the branch."""
        if not self._backfill:
            return
        entered = self.entered
        if entered > 1:
            self._set_aside(entered - 1)
            self._ids[0], self._carried[0] = self._ids[entered - 1], self._carried[entered - 1]
            self.entered = 1
        if self.unread:
            self.grow_caches(self.length)
            self._read_caches()
            _catch_up([self])

    def learn_from(
        self, rates: TextRates | None, calibration: ConfidenceCounts | None = None
    ) -> None:
        """From now on drafts follow the text by these rates, and believe their confidence as far
        as `calibration` says; None: entirely.
        """
        self._learned = rates, calibration  # the kernel reads them by address
        if rates is not None:
            for name in ("first_accepted", "first_against", "next_accepted"):
                setattr(self.limits.ngram, name, abi.doubles(getattr(rates, name)))
        for name in ("tries", "hits"):
            counts = None if calibration is None else getattr(calibration, name)
            setattr(self.limits, name, abi.NULL if counts is None else abi.doubles(counts))

    def look_up(self, most: int) -> tuple[list[int], int]:
        """What the text had after the tokens it ends in, as `TextSource.look_up`."""
        return self._text.look_up(self.limits.ngram.longest, most)

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.cache.lengths[self.step.sequence]

    def grow_caches(self, length: int) -> None:
        """Room for a step after `length` committed tokens in both caches, which may move them: for
        all sequences that use them.
        """
        for store in (self.cache, self._own):
            if store is not None:
                store.make_room_to(length + self.capacity)

    def _read_caches(self) -> None:
        """Passes the caches' addresses and the sequence's committed length to the step."""
        cache, own, step = self.cache, self._own, self.step
        step.length = self.length
        self._text.make_room()
        seen = cache.version, 0 if own is None else own.version
        if seen == self._cache_versions:
            return
        self._cache_versions = seen
        step.caches, step.capacity = cache.address, cache.capacity
        if own is not None:
            step.block_cache, step.block_capacity = own.address, own.capacity


def _places(bits: int) -> frozenset[int]:
    """The numbers of the bits that are set."""
    return frozenset(n for n in range(bits.bit_length()) if bits >> n & 1)


def run_together(every: Sequence[FusedSteps], growths: Sequence[Growth]) -> list[FusedStep]:
    """A step of each sequence: a level of all drafts is one pass, and so is their verification."""
    # the kernel wants those whose branch drafts first
    order = sorted(range(len(every)), key=lambda i: not growths[i].own)
    those = [every[i] for i in order]
    first = those[0]
    first.grow_caches(max(one.length for one in those))
    greedy = first.greedy(those)
    for i in order:
        every[i].prepare(growths[i], greedy)
    _catch_up([every[i] for i in order if growths[i].own and every[i].unread])
    finite = library.kernel().mr_speculative_steps(
        first.decoder.workspace.address,
        abi.ffi.new("SpeculativeStep *[]", [one.step for one in those]),
        len(those),
    )
    if not finite:
        raise UserError(NOT_FINITE)
    for one in those:
        if not one.step.chooses:
            one.accept_chosen()
    return [one.ended() for one in every]


def _catch_up(every: Sequence[FusedSteps]) -> None:
    """Tokens that wait for the branch, more than enter with its next draft, run through it; only
    its own K/V are written.
    """
    if not every:
        return
    for one in every:  # what the branch's own layer will not see
        one.unread.keep_seen()
    first = every[0]
    ids = np.concatenate([one.unread.ids for one in every])
    carried = np.concatenate([one.unread.carried for one in every])
    rows = Rows.concat(
        [
            Rows.causal(
                one.step.sequence,
                one.length - one.entered + 1 - len(one.unread),
                len(one.unread),
            )
            for one in every
        ]
    )
    x = abi.floats_for(len(ids), first.decoder.info.hidden_size)
    step = first.step
    library.kernel().mr_branch_step(
        first.decoder.workspace.address,
        step.branch,
        step.caches,
        step.block_cache,
        step.block_capacity,
        abi.rows_of(rows, first.cache.capacity),
        0,
        abi.longs(ids),
        abi.floats(carried) if carried.size else abi.NULL,
        abi.tensor(x),
    )
    for one in every:
        one.unread.clear()
