"""Two-stage verification (stages.py) for drafters that return drafts and do not run steps of their
own.

While the quantised copy's steps run, the sampler's text and the cache contain their tokens as if
emitted, so the drafter sees no difference. Both are cut back before the full-precision weights
verify.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from multirate.decoding.costs import measure_costs
from multirate.decoding.draft_length import DraftLengthController, StepCosts
from multirate.decoding.drafter import Draft, Drafter, FusedStep, Verified
from multirate.decoding.sampler import Sampler
from multirate.methods.common.staged_config import StagedConfig
from multirate.methods.common.stages import NOTHING, Behind, Stages, with_behind
from multirate.methods.common.stream_estimates import NARROW_COSTS
from multirate.methods.common.wrapped_drafter import WrappedDrafter
from multirate.model.decoder import Decoder
from multirate.model.kv_cache import KVCache
from multirate.model.native.cache import NativeKVCache
from multirate.model.native.decoder import NativeDecoder, narrow_weights
from multirate.model.native.draft_verification import MAX_NODES, DraftVerification
from multirate.model.noise import Noise

_MEASURING_SECONDS = 0.1


def in_stages(
    drafter: Drafter, decoder: Decoder, config: StagedConfig, stages: bool = True
) -> Drafter:
    """`drafter` with two-stage verification as the settings ask, if `decoder` can have a quantised
    copy; otherwise, or if the settings turn it off, `drafter` itself.
    """
    stages = stages and config.staged > 0 and drafter.max_nodes <= MAX_NODES
    if stages and narrow_weights(decoder):
        return StagedDrafter(drafter, decoder, config)
    return drafter


class StagedDrafter(WrappedDrafter):
    """Verifies `drafter`'s drafts with the quantised copy, and its tokens with the full-precision
    weights.

    How far to draft depends on what drafts brought and on NARROW_COSTS; only drafting time is
    measured. Looked-up drafts (JoinedDrafter) are used as they are.
    """

    def __init__(self, drafter: Drafter, decoder: NativeDecoder, config: StagedConfig) -> None:
        super().__init__(drafter)
        self._decoder, self._stages = decoder, Stages(decoder, config)
        self._draws = True  # whether the last round used the drafter
        self._ahead: tuple[DraftVerification, DraftLengthController] | None = None
        # what the last full-precision pass accepted, until the next step
        self._settled: Verified | None = None
        # a tail draft that was not used: the next round takes it, because a drafter is asked only
        # once for a draft after the same text
        self._unused: Draft | None = None

    def prepare(self) -> None:
        super().prepare()
        self._stages.prepare()
        self._prepare_ahead()

    def _prepare_ahead(self) -> tuple[DraftVerification, DraftLengthController]:
        """What verifies the copy's rounds, and what decides how far to draft; made once. Not during
        a generation.
        """
        if self._ahead is None:
            narrow = self._decoder.in_8_bits()
            taken = measure_costs(narrow, self.start, self.trial_step(), _MEASURING_SECONDS).costs
            level, fixed = (s / taken.plain_step for s in (taken.draft_step, taken.draft_fixed))
            # layers that drafted a token do not run again to verify it
            verify = {rows: max(cost - fixed, 0.0) for rows, cost in NARROW_COSTS.verify.items()}
            costs = StepCosts(NARROW_COSTS.plain_step, verify, level, fixed)
            controller = DraftLengthController(
                costs,
                self.max_nodes,
                expected=self.expected,
                timed=False,
            )
            self._ahead = self._decoder.narrow_verification(), controller
        return self._ahead

    def begin(self, cache: KVCache, sampler: Sampler) -> None:
        self._enter(cache, sampler)
        super().begin(cache, sampler)

    def resume(self, cache: KVCache, sampler: Sampler) -> None:
        self._enter(cache, sampler)
        super().resume(cache, sampler)

    def _enter(self, cache: KVCache, sampler: Sampler) -> None:
        assert isinstance(cache, NativeKVCache)
        self._cache, self._sampler, self._settled = cache, sampler, None
        self.in_stages = self._stages.begin(sampler)
        if self.in_stages:
            _, controller = self._prepare_ahead()
            controller.pause()

    def fused_steps(
        self, seqs: Sequence[int], last_tokens: Sequence[int], limits: Sequence[int]
    ) -> list[list[FusedStep]] | None:
        if not self.in_stages:
            return None
        (seq,), (limit,) = seqs, limits
        if self._settled is not None:
            self.settle(seq, self._settled)
            self._settled = None
        self._unused = None
        text = self._sampler.tokens[seq]
        known, committed = len(text), self._cache.lengths[seq]

        def settle(tokens: Sequence[int], behind: Behind) -> FusedStep:
            self._cut(seq, known, committed)
            return self._verify(seq, tokens, behind)

        self.ahead = self.drafter.ahead = True
        try:
            run, follow = partial(self._run_ahead, seq), partial(self.continuation, seq)
            behind = partial(self._draft_behind, seq)
            step = self._stages.run(limit, run, settle, behind, self.ends, follow)
        finally:
            self.ahead = self.drafter.ahead = False
            self._cut(seq, known, committed)
        return [[step]]

    def _cut(self, seq: int, known: int, committed: int) -> None:
        """Text and cache are as before the steps ahead."""
        del self._sampler.tokens[seq][known:]
        self._cache.truncate(seq, committed)

    def _draft_behind(self, seq: int, most: int) -> Behind:
        """The tail draft that `Stages.run` asks for; from the drafter only if the last pre-verified
        step used it as well.
        """
        (matched,) = self.matched([seq])
        if not (matched or self._draws):
            return NOTHING
        begin = time.perf_counter()
        last = self._sampler.tokens[seq][-1]
        (draft,) = self.draft([seq], [last], [most], self._sampler)
        self._unused = draft = draft.cut(most, most)
        self.drafting_seconds += time.perf_counter() - begin
        return draft.tokens, draft.parents

    def _run_ahead(self, seq: int, limit: int, wanted: int) -> list[FusedStep]:
        """One step that the quantised copy verifies."""
        assert self._ahead is not None
        narrow, controller = self._ahead
        begin = time.perf_counter()
        text, last = self._sampler.tokens[seq], self._sampler.tokens[seq][-1]
        (matched,) = self.matched([seq])
        most = limit
        if not matched:  # else the text drafts, which takes no time
            self.worth = controller.thresholds()[1]
            self._draws = controller.choose([(0, 0)], limit, self.behind([seq])).stream
            most *= self._draws
        draft, self._unused = self._unused, None
        if draft is None:
            (draft,) = self.draft([seq], [last], [most], self._sampler)
        draft = draft.cut(most, self.max_nodes)
        draft.check()
        tokens = [last, *draft.tokens]
        drafted = time.perf_counter()
        done = narrow.run(
            self._cache,
            seq,
            tokens,
            draft.parents,
            self._noise(seq),
            self.top,
            draft.hidden,
            self.start,
        )
        verified = time.perf_counter()
        text += done.tokens
        self._cache.commit(seq, len(done.path))
        levels = max(draft.depths)
        if not matched:
            controller.emitted(len(done.tokens), levels, len(draft.tokens))
        self.accept(seq, Verified(done.path, tokens, done.hidden, top=done.best))
        self.drafting_seconds += drafted - begin + time.perf_counter() - verified
        return [FusedStep(done.tokens, len(draft.tokens), levels)]

    def _verify(self, seq: int, ahead: Sequence[int], behind: Behind) -> FusedStep:
        """Verifies the pre-verified tokens and a tail draft with the full-precision weights."""
        drafted, parents = with_behind(ahead, behind)
        tokens = [self._sampler.tokens[seq][-1], *drafted]
        done = self._decoder.verify_draft(self._cache, seq, tokens, parents, self._noise(seq))
        assert done is not None
        self._settled = Verified(done.path, tokens, done.hidden, ahead=len(ahead))
        return FusedStep(done.tokens, len(parents), max(Draft(drafted, parents).depths))

    def _noise(self, seq: int) -> Noise | None:
        return None if self._sampler.plain else self._sampler.noise(seq)
