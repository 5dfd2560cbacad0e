"""Combines a drafter with text lookup: after a match of sufficient length the text's continuation
is the draft, otherwise the drafter drafts [SAM-Decoding, Hu et al. 2024: `len_threshold`].

For drafters whose drafts come from outside the model. Trained draft branches weigh both in one tree
instead (branch_drafter.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.costs import CostModel
from multirate.decoding.speculate.drafter import Draft, Drafter, DraftRequest, Verified
from multirate.decoding.speculate.text_source import TextSource
from multirate.methods._shared.lookup import Lookup, LookupConfig
from multirate.runtime.decoder import Decoder
from multirate.runtime.kv_cache import KVCache

LEAST = 4
"""Length of a match, in tokens, from which on it drafts."""
MOST_TOKENS = 10
"""Of a looked-up draft."""


class JoinedConfig(LookupConfig):
    """Settings of drafters whose drafts the text's replace."""

    def joined(self, drafter: Drafter, decoder: Decoder) -> Drafter:
        """The drafter that these settings ask for, with drafts that `decoder` verifies."""
        return JoinedDrafter(drafter, self.texts, decoder) if self.lookup else drafter


class JoinedDrafter(Drafter):
    """Uses `drafter` if the text's match is shorter than LEAST.

    The drafter receives every verified step, including those that looked up their draft (`accept`),
    and keeps what it needs.
    """

    def __init__(self, drafter: Drafter, texts: str | None, decoder: Decoder) -> None:
        traits = drafter.traits
        if traits.taps or traits.adapts or traits.start:
            raise ValueError(f"{type(drafter).__name__} cannot leave a draft to the text")
        self.drafter = drafter
        self._lookup = Lookup.of(texts, decoder)
        self.traits = replace(
            drafter.traits,
            looks_up=True,
            longest=self._lookup.told,
            max_nodes=max(drafter.traits.max_nodes, MOST_TOKENS),
        )
        self._texts: list[TextSource] = []
        self._sampler: Sampler | None = None

    def costs(self, decoder: Decoder) -> CostModel:
        return self.drafter.costs(decoder)

    def trial_step(self) -> Callable[[], object] | None:
        return self.drafter.trial_step()

    def begin(self, cache: KVCache, sampler: Sampler) -> None:
        self._follow(sampler)
        self.drafter.begin(cache, sampler)

    def usable(self, cache: KVCache, length: int) -> int:
        return self.drafter.usable(cache, length)

    def resume(self, cache: KVCache, sampler: Sampler) -> None:
        self._follow(sampler)
        self.drafter.resume(cache, sampler)

    def prefill(
        self,
        seqs: Sequence[int],
        prompts: Sequence[Sequence[int]],
        hidden_final: Sequence[Tensor],
        taps: Sequence[Mapping[int, Tensor]],
    ) -> None:
        self.drafter.prefill(seqs, prompts, hidden_final, taps)

    def behind(self, seqs: Sequence[int]) -> int:
        return self.drafter.behind(seqs)

    def accept(self, seq: int, verified: Verified) -> None:
        self.drafter.accept(seq, verified)

    def draft(self, request: DraftRequest) -> list[Draft]:
        drafts: dict[int, Draft] = {}
        for b, limit in request.pairs:
            most = min(limit, MOST_TOKENS)
            if not most:
                continue
            tokens, matched = self._texts[b].look_up(request.sampler.tokens[b], most)
            if self._drafts(matched):
                there = self._lookup.in_given(matched)
                drafts[b] = Draft.chain(tokens[: there or None])
                drafts[b].copied = range(1, len(drafts[b].tokens) + 1)
        asked = [i for i, b in enumerate(request.seqs) if b not in drafts]
        if asked:
            rest = request.part(asked)
            drafts |= zip(rest.seqs, self.drafter.draft(rest), strict=True)
        return [drafts[b] for b in request.seqs]

    def matched(self, seqs: Sequence[int]) -> list[int]:
        """See Drafter; what the drafter itself brings is counted as a match of length 0."""
        assert self._sampler is not None
        told = [self._texts[b].look_up(self._sampler.tokens[b], 1)[1] for b in seqs]
        return [n if self._drafts(n) else 0 for n in told]

    def _drafts(self, matched: int) -> bool:
        """Whether to draft from a match with this number; matches in other texts must be twice as
        long.
        """
        there = self._lookup.in_given(matched)
        return there >= 2 * LEAST if there else matched >= LEAST

    def _follow(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._texts = [self._lookup.source() for _ in sampler.tokens]
