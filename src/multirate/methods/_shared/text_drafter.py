"""Drafts by text lookup alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.acceptance import choose_path
from multirate.decoding.speculate.acceptance_statistics import ContinuationRates
from multirate.decoding.speculate.drafter import Draft, Drafter, DraftRequest, Traits
from multirate.decoding.speculate.text_source import TextSource
from multirate.methods._shared.lookup import Lookup
from multirate.runtime.decoder import Decoder
from multirate.runtime.fused import FusedSequences, FusedStep, Growth, copying
from multirate.runtime.kv_cache import KVCache


class TextDrafter(Drafter):
    """Drafts what followed where the end of the text occurred before, at most `tokens` tokens.

    length: how many to draft after a match of this length; None: all. On the native decoder a step
    is one kernel call.
    """

    def __init__(
        self,
        decoder: Decoder,
        lookup: Lookup,
        tokens: int,
        length: Callable[[int], int] | None = None,
    ) -> None:
        self.traits = Traits(max_nodes=tokens, longest=lookup.told, joins=True)
        self.text_rates = ContinuationRates(lookup.longest, lookup.told)
        self._most = tokens
        self._lookup, self._length = lookup, length
        self._texts: list[TextSource] = []
        self._similar: dict[int, list[int]] = {}
        self._fused = decoder.text_steps(tokens, lookup)

    def begin(self, cache: KVCache, sampler: Sampler) -> None:
        self._texts = [self._lookup.source() for _ in sampler.tokens]
        self._sampler, self._similar = sampler, {}
        if self._fused is not None:
            self._fused.begin(cache, sampler, partial(choose_path, sampler))

    def joined(self, seq: int, similar: Sequence[int]) -> None:
        if similar:
            self._similar[seq] = list(similar)

    def leave(self, seq: int) -> None:
        self._texts[seq] = self._lookup.source()
        self._similar.pop(seq, None)
        if self._fused is not None:
            self._fused.leave(seq)

    def _text(self, seq: int) -> list[int]:
        """What is looked up: the sequence's tokens, after a text that it is likely to repeat."""
        tokens, similar = self._sampler.tokens[seq], self._similar.get(seq)
        return tokens if similar is None else [*similar, *tokens]

    def usable(self, cache: KVCache, length: int) -> int:
        return length  # what is looked up is made anew from the tokens

    def draft(self, request: DraftRequest) -> list[Draft]:
        """The draft is empty where not even the last token occurred before."""
        drafts = []
        for b, limit in request.pairs:
            most = min(limit, self._most)
            if b in request.forced:
                tokens = list(request.forced[b][:most])
            else:
                tokens, matched = self._texts[b].look_up(self._text(b), most)
                tokens = tokens[: self._wanted(matched)]
            draft = Draft.chain(tokens)
            draft.copied = range(1, len(draft.tokens) + 1)
            drafts.append(draft)
        return drafts

    def matches(self, seqs: Sequence[int], most: int) -> list[tuple[list[int], int]]:
        found = []
        for b in seqs:
            if self._fused is not None and b in self._fused:
                found.append(self._fused.look_up(b, most))
            else:
                found.append(self._texts[b].look_up(self._text(b), most))
        return found

    def fused_steps(self, request: DraftRequest) -> list[FusedStep] | None:
        fused, seqs, sampler = self._fused, request.seqs, request.sampler
        if fused is None:
            return None
        for seq in seqs:
            if seq not in fused:
                fused.enter(seq, sampler.tokens[seq][-1:], text=self._text(seq))
        forced = request.forced
        growths = [
            self._growth(fused, seq, limit, forced.get(seq, ())) for seq, limit in request.pairs
        ]
        return fused.run(seqs, growths)

    def _growth(self, fused: FusedSequences, seq: int, limit: int, forced: Sequence[int]) -> Growth:
        """The forced tokens, else how far the text is followed: at most `limit` tokens."""
        most = min(limit, self._most)
        if forced:
            return Growth(min(len(forced), most), forced=forced)
        if self._length is not None and most:
            most = min(most, self._wanted(fused.look_up(seq, most)[1]))
        return copying(most)

    def _wanted(self, matched: int) -> int:
        if self._length is None:
            return self._most
        # no more tokens of other texts than were matched: longer drafts cost more than they brought
        there = self._lookup.in_given(matched)
        if there:
            return min(there, self._length(there))
        return self._length(matched)
