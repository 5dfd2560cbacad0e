"""A drafter joined to the text: what followed the end of the text is drafted where it was the same
for long enough, else what the drafter says [SAM-Decoding, Hu et al. 2024: `len_threshold`].

For drafters whose drafts come from outside the model. Those that grow from a trained stream weigh
the two in one tree instead (stream_drafter.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from multirate.decoding.costs import CostModel
from multirate.decoding.drafter import Draft, Drafter, Verified
from multirate.decoding.sampler import Sampler
from multirate.decoding.text_source import TextSource
from multirate.methods.common.config import MethodConfig
from multirate.methods.common.lookup import Lookup, LookupName, check_texts
from multirate.model.decoder import Decoder
from multirate.model.kv_cache import KVCache


@dataclass(frozen=True)
class JoinedConfig(MethodConfig):
    """lookup: by what the end of the text is looked up; null: it is not. lookup_least: the shortest
    match that is drafted from. lookup_tokens: of such a draft, at most. texts: a file of other
    texts (`multirate texts`) in which it is looked up, too; a model's name: those that the package
    has of it.
    """

    lookup: LookupName | None = None
    lookup_least: int = 4
    lookup_tokens: int = 10
    texts: str | None = None

    def check(self) -> None:
        super().check()
        self.require_count("lookup_least", "lookup_tokens")
        check_texts(self, self.texts, self.lookup is not None)

    def joined(self, drafter: Drafter, decoder: Decoder) -> Drafter:
        """The drafter that these settings ask for, of drafts that `decoder` verifies."""
        return drafter if self.lookup is None else JoinedDrafter(drafter, self, decoder)


class JoinedDrafter(Drafter):
    """Asks `drafter` where the text's match is shorter than `lookup_least`.

    The drafter hears of every verified step, of those with the text's draft, too (`accept`), and
    keeps what it needs of them.
    """

    def __init__(self, drafter: Drafter, config: JoinedConfig, decoder: Decoder) -> None:
        assert config.lookup is not None
        if drafter.start or drafter.taps or drafter.adapts:
            raise ValueError(f"{type(drafter).__name__} cannot leave a draft to the text")
        self.drafter, self._least = drafter, config.lookup_least
        found = Lookup.of(config.lookup, config.texts, decoder)
        # a match need not be told longer than it decides
        self._lookup = replace(found, longest=max(found.longest, self._least))
        self.longest, self._tokens = self._lookup.told, config.lookup_tokens
        self.max_nodes = max(drafter.max_nodes, config.lookup_tokens)
        self.top = drafter.top
        self.lossless, self.repeats_text = drafter.lossless, drafter.repeats_text
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

    def draft(
        self,
        seqs: Sequence[int],
        last_tokens: Sequence[int],
        limits: Sequence[int],
        sampler: Sampler,
    ) -> list[Draft]:
        """See Drafter."""
        drafts: dict[int, Draft] = {}
        for b, limit in zip(seqs, limits, strict=True):
            most = min(limit, self._tokens)
            if not most:
                continue
            tokens, matched = self._texts[b].look_up(sampler.tokens[b], most)
            if self._drafts(matched):
                drafts[b] = Draft.chain(tokens[: self._lookup.in_given(matched) or None])
                drafts[b].copied = range(1, len(drafts[b].tokens) + 1)
        asked = [i for i, b in enumerate(seqs) if b not in drafts]
        if asked:
            self.drafter.worth = self.worth
            own = self.drafter.draft(
                [seqs[i] for i in asked],
                [last_tokens[i] for i in asked],
                [limits[i] for i in asked],
                sampler,
            )
            drafts |= {seqs[i]: draft for i, draft in zip(asked, own, strict=True)}
        return [drafts[b] for b in seqs]

    def behind(self, seqs: Sequence[int]) -> int:
        return self.drafter.behind(seqs)

    def matched(self, seqs: Sequence[int]) -> list[int]:
        """See Drafter; what the drafter itself brings is counted as a match of length 0."""
        assert self._sampler is not None
        told = [self._texts[b].look_up(self._sampler.tokens[b], 1)[1] for b in seqs]
        return [n if self._drafts(n) else 0 for n in told]

    def accept(self, seq: int, verified: Verified) -> None:
        self.drafter.accept(seq, verified)

    def _drafts(self, matched: int) -> bool:
        """Whether a match that is told as this is drafted from; one in other texts has to be twice
        as long.
        """
        there = self._lookup.in_given(matched)
        return there >= 2 * self._least if there else matched >= self._least

    def _follow(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._texts = [self._lookup.source() for _ in sampler.tokens]
