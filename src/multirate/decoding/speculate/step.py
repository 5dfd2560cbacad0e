"""Speculative decoding as a step: draft, verify all rows in one pass, accept, commit. Independent
of the method.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from multirate.decoding.results import Origin
from multirate.decoding.session import Session
from multirate.decoding.speculate.acceptance import Verdict, accept_chosen, accept_greedy, split
from multirate.decoding.speculate.budget import BudgetPolicy
from multirate.decoding.speculate.costs import CostModel
from multirate.decoding.speculate.drafter import Draft, Drafter, DraftRequest, Verified
from multirate.decoding.step import Step
from multirate.runtime.decoder import Decoder
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import Rows

Watch = Callable[[int, Draft, Sequence[int]], None]
"""watch(sequence, its draft, for each emitted token the node it came from, 0 for one that the
target chose).
"""
_DRAFT: tuple[Origin, ...] = ("draft",)
_TEXT: tuple[Origin, ...] = ("text",)
_MODEL: tuple[Origin, ...] = ("model",)


class SpeculativeStep(Step):
    """Drafts of `drafter`, verified by the target model, except for tokens that the drafter accepts
    unverified.

    watch: called after every step with what became of the draft; None: not called.

    Nodes in `Draft.unverified` are emitted when they are reached, whatever the target would choose.
    Their deeper layers run in the same pass as the verified rows, so K/V stay exact. The text of a
    lossy step depends on nothing that is timed: `adapt` does nothing.

    If the drafter can run a whole step in one call (`Drafter.fused_steps`), it does: the same
    tokens, faster. Watched steps are never fused. Other drafts of one sequence are verified in one
    call if the decoder can (`Decoder.verify_draft`).
    """

    tells_split = True

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.traits = drafter, drafter.traits
        traits = self.traits
        self.slots, self.taps = traits.max_nodes + 1, traits.taps
        self.lossless, self.looks_up = traits.lossless, traits.looks_up
        if any(tap < traits.start for tap in traits.taps):
            raise ValueError(
                f"taps {traits.taps} lie below layer {traits.start}, where verification begins"
            )
        self._expected: tuple[float, ...] = ()
        self._rests = True
        self.watch: Watch | None = None
        self._policy: BudgetPolicy | None = None
        self._adapts = False
        # what each sequence's text continues with, and the match length, in this step; empty if
        # the policy did not plan it
        self._matches: dict[int, tuple[list[int], int]] = {}
        self._forced: Collection[int] = ()  # sequences whose draft is none of the drafter's

    def begin(self, session: Session, resumed: bool) -> None:
        if self._policy is not None:
            self._policy.pause()
        self.drafting_seconds = 0.0
        begin = self.drafter.resume if resumed else self.drafter.begin
        begin(session.cache, session.sampler)

    def usable(self, cache: KVCache, length: int) -> int:
        return self.drafter.usable(cache, length)

    def prefilled(
        self,
        session: Session,
        seqs: Sequence[int],
        hidden: Sequence[Tensor],
        taps: Sequence[Mapping[int, Tensor]],
    ) -> None:
        # the first token has been emitted already; a drafter is told of the prompt alone
        prompts = [session.prompts[b] for b in seqs]
        self.drafter.prefill(seqs, prompts, hidden, taps)

    @property
    def joins(self) -> bool:  # type: ignore[override]
        return self.traits.joins

    def joined(self, session: Session, seq: int, similar: Sequence[int]) -> None:
        self.drafter.joined(seq, similar)

    def leave(self, seq: int) -> None:
        self.drafter.leave(seq)

    def caches(self) -> list[KVCache]:
        return self.drafter.caches()

    def settle(self, session: Session, seq: int) -> int:
        return min(self.drafter.settle(seq), session.cache.lengths[seq])

    def interrupted(self) -> None:
        if self._policy is not None:
            self._policy.interrupted()
        self.drafter.interrupted()

    def finish(self, session: Session) -> None:
        session.stats.highest_rejected = self.drafter.highest_rejected

    def costs(self, decoder: Decoder) -> CostModel | None:
        return self.drafter.costs(decoder) if self.lossless else None

    def adapt(self, decoder: Decoder, on: bool) -> bool:
        if not self.lossless:
            return False
        self._rests, self._adapts = on, on and not self.traits.adapts
        if self._adapts and self._policy is None:
            costs = self.drafter.costs(decoder).costs
            self._policy = BudgetPolicy(
                costs,
                self.traits.max_nodes,
                self.drafter.text_rates,
                expected=self._expected,
                longest=self.traits.longest,
            )
        return on

    def expect(self, rates: Sequence[float]) -> None:
        self._expected = tuple(rates)
        self.drafter.expect(rates)

    def run(self, session: Session) -> None:
        seqs = session.active
        limits = [session.most_drafted(b) for b in seqs]
        fuses = self.watch is None
        self._matches, worth = {}, None
        forced = session.sampler.forced([b for b, limit in zip(seqs, limits, strict=True) if limit])
        if self._policy is not None and self._adapts:
            worth = self._policy.thresholds(len(seqs), session.refilled)[1]
            if not forced and self._policy.skips_drafts():
                limits = [0] * len(seqs)
            else:
                limits = self._planned(self._policy, seqs, limits, forced.keys())
        request = DraftRequest(
            seqs, limits, session.sampler, worth, forced, self._rests, session.refilled
        )
        if fuses and self._run_fused(session, request):
            return
        cache, stops = session.cache, session.stops
        last_tokens = request.last_tokens
        begin = time.perf_counter()
        drafts = self.drafter.draft(request)
        drafts = [
            draft.cut(limit, self.traits.max_nodes)
            for draft, limit in zip(drafts, limits, strict=True)
        ]
        self.drafting_seconds += time.perf_counter() - begin
        in_place = self._verify_in_one_call(session, seqs, last_tokens, drafts)
        found = self._verify(session, seqs, last_tokens, drafts) if in_place is None else [in_place]
        for b, draft, verified, bonus in found:
            path = verified.path
            origins: list[Origin] = [
                "text" if node in draft.copied else "draft" for node in path[1:]
            ]
            tokens = [*(draft.tokens[node - 1] for node in path[1:]), bonus]
            kept = session.emit(b, tokens, [*origins, "model"])
            self._count_exits(session, kept, sum(n in draft.unverified for n in path[1 : kept + 1]))
            levels = len(draft.tokens) if draft.is_chain else max(draft.depths)
            session.count_draft(b, len(draft.tokens), levels, min(kept, len(path) - 1))
            self._tell_policy(b, tokens, levels, len(draft.tokens))
            if self.watch is not None:
                self.watch(b, draft, [*path[1:], 0][:kept])
            # the last token emitted is not in the cache yet: it enters with the next step
            verified.path = path[:kept]
            if in_place is None:
                length = cache.lengths[b]
                cache.keep(b, [length + node for node in verified.path])
            else:
                cache.commit(b, kept)
            if stops.reasons[b] is None:
                begin = time.perf_counter()
                self.drafter.accept(b, verified)
                self.drafting_seconds += time.perf_counter() - begin

    def _planned(
        self, policy: BudgetPolicy, seqs: Sequence[int], limits: list[int], forced: Collection[int]
    ) -> list[int]:
        """How many tokens each sequence drafts. Text lookup decides for each sequence by its match;
        other drafts of a batch share passes, so all sequences draft or none does.
        """
        rates = self.drafter.text_rates
        most = 1 if rates is None else self.traits.max_nodes
        found = self.drafter.matches(seqs, most)
        self._matches = dict(zip(seqs, found, strict=True))
        self._forced = forced
        useful = [0 if rates is None else min(limit, self.traits.max_nodes) for limit in limits]
        plan = policy.choose(
            [(matched, count) for (_, matched), count in zip(found, useful, strict=True)],
            max(limits),
            self.drafter.behind(seqs),
            own=rates is None and len(forced) < len(seqs),
        )
        if plan.own:
            return limits
        return [
            limit if b in forced else min(limit, count)
            for b, limit, count in zip(seqs, limits, plan.text, strict=True)
        ]

    def _tell_policy(self, seq: int, emitted: Sequence[int], levels: int, nodes: int) -> None:
        if self._policy is None or seq not in self._matches:
            return
        continuation, matched = self._matches[seq]
        own = seq not in self._forced
        self._policy.emitted(len(emitted), levels, nodes, matched, own=own)
        if matched and self.drafter.text_rates is not None:
            self.drafter.text_rates.observe_text(continuation, matched, emitted)

    def _count_exits(self, session: Session, kept: int, unverified: int) -> None:
        """Counts `kept` emitted tokens, `unverified` of them accepted unverified."""
        if not self.traits.lossless:
            session.stats.count_exits(self.traits.start, unverified)
            session.stats.count_exits(session.decoder.info.num_layers, kept - unverified)

    def _run_fused(self, session: Session, request: DraftRequest) -> bool:
        """Runs each active sequence's step in one call, if the drafter can."""
        every = self.drafter.fused_steps(request)
        if every is None:
            return False
        for b, done in zip(request.seqs, every, strict=True):
            self._tell_policy(b, done.tokens, done.levels, done.drafted)
            accepted = len(done.tokens) - 1
            own = min(done.own, accepted)
            kept = session.emit(b, done.tokens, _DRAFT * own + _TEXT * (accepted - own) + _MODEL)
            self._count_exits(session, kept, sum(place < kept for place in done.unverified))
            session.cache.commit(b, kept)
            if done.drafted:
                session.count_draft(b, done.drafted, done.levels, min(kept, accepted))
        return True

    def _verify_in_one_call(
        self, session: Session, seqs: list[int], last_tokens: list[int], drafts: list[Draft]
    ) -> tuple[int, Draft, Verified, int] | None:
        """Verifies the only active sequence's draft in one call and leaves its K/V in place;
        otherwise as `_verify`. None: that is not possible, and nothing has changed.
        """
        traits, sampler, draft = self.traits, session.sampler, drafts[0]
        if len(seqs) > 1 or traits.taps or draft.unverified or not sampler.by_argmax(seqs):
            return None
        draft.check()
        seq, tokens = seqs[0], [last_tokens[0], *draft.tokens]
        noise = sampler.noises(seqs, [0])
        done = session.decoder.verify_draft(
            session.cache,
            seq,
            tokens,
            draft.parents,
            noise[0] if noise else None,
            traits.top,
            draft.hidden,
            traits.start,
        )
        if done is None:
            return None
        verified = Verified(done.path, tokens, done.hidden, top=done.best)
        return seq, draft, verified, done.tokens[-1]

    def _verify(
        self, session: Session, seqs: list[int], last_tokens: list[int], drafts: list[Draft]
    ) -> list[tuple[int, Draft, Verified, int]]:
        """Runs all last tokens and nodes through layers [start, L), sequence after sequence in one
        pass.

        Returns for each sequence its number, its draft, what verification found, and the bonus
        token.
        """
        decoder, sampler, traits = session.decoder, session.sampler, self.traits
        counts = [len(draft.tokens) + 1 for draft in drafts]
        lengths = session.cache.lengths
        parts = [draft.rows(b, lengths[b]) for b, draft in zip(seqs, drafts, strict=True)]
        rows = Rows.concat(parts)
        simple = sampler.by_argmax(seqs) and not traits.top
        x: Tensor | None = None
        ids: list[int] | None = None
        taps: Mapping[int, Tensor] = {}
        reached = 0
        if simple and not traits.taps and all(draft.hidden is None for draft in drafts):
            # nobody has run a layer of any row yet: one pass runs all of them
            pairs = zip(last_tokens, drafts, strict=True)
            ids = [token for last, draft in pairs for token in (last, *draft.tokens)]
        else:
            x = self._entering(session, last_tokens, drafts, parts)
            # below the last tap layer by layer, above it in one piece
            reached = max(traits.taps, default=traits.start)
            x, taps = decoder.layers_with_taps(
                x, rows, traits.start, reached, session.cache, traits.taps
            )
        best: list[list[int]] | None = None
        if simple:
            noise = sampler.noises(
                [b for b, count in zip(seqs, counts, strict=True) for _ in range(count)],
                [ahead for draft in drafts for ahead in draft.depths],
            )
            hidden, target = decoder.next_tokens(rows, session.cache, ids, x, reached, noise)
            verdicts: list[Verdict] = [
                accept_greedy(draft, part)
                for draft, part in zip(drafts, split(target, counts), strict=True)
            ]
        else:
            assert x is not None
            hidden = decoder.layers(x, rows, reached, decoder.info.num_layers, session.cache)
            logits = decoder.logits(hidden)
            if traits.top:
                best = decoder.top_tokens(logits, traits.top)
            verdicts = accept_chosen(sampler, seqs, drafts, logits)
        found, begin = [], 0
        for b, last, draft, (path, bonus), count in zip(
            seqs, last_tokens, drafts, verdicts, counts, strict=True
        ):
            part = slice(begin, begin + count)
            verified = Verified(
                path,
                [last, *draft.tokens],
                hidden[part],
                {layer: states[part] for layer, states in taps.items()},
                None if best is None else best[part],
            )
            found.append((b, draft, verified, bonus))
            begin += count
        return found

    def _entering(
        self,
        session: Session,
        last_tokens: list[int],
        drafts: list[Draft],
        parts: list[Rows],
    ) -> Tensor:
        """Residuals [N, d] of all last tokens and nodes as they enter layer `start`."""
        without_hidden = [i for i, draft in enumerate(drafts) if draft.hidden is None]
        entering: list[Tensor | None] = [draft.hidden for draft in drafts]
        if without_hidden:
            # these drafts have no `hidden`: one call embeds them and runs the layers below `start`
            ids = [token for i in without_hidden for token in (last_tokens[i], *drafts[i].tokens)]
            parts_without = [parts[i] for i in without_hidden]
            x = session.forward(ids, Rows.concat(parts_without), stop=self.traits.start)
            for i, part in zip(
                without_hidden, x.split([len(p) for p in parts_without]), strict=True
            ):
                entering[i] = part
        hidden = [part for part in entering if part is not None]
        return hidden[0] if len(hidden) == 1 else torch.cat(hidden)
