"""Drafts by looking the last n tokens up in prompt and output [Saxena 2023]. No model, no
training.
"""

from __future__ import annotations

from collections.abc import Sequence

from multirate.decoding.drafter import Draft, Drafter, FusedStep
from multirate.decoding.ngram import TextIndex
from multirate.decoding.sampler import Sampler
from multirate.methods.common.fused_steps import FusedSteps
from multirate.methods.prompt_lookup.config import PromptLookupConfig
from multirate.model.decoder import Decoder
from multirate.model.kv_cache import KVCache
from multirate.model.native import NativeDecoder, abi
from multirate.model.native.cache import NativeKVCache


class PromptLookupDrafter(Drafter):
    """The longest n-gram (n ≤ max_ngram) that occurred before proposes what followed its latest
    occurrence.

    On the native decoder a step of one sequence is a kernel call, as M2R2's and Kangaroo's are.
    """

    start = 0

    def __init__(self, decoder: Decoder, config: PromptLookupConfig) -> None:
        self.config = config
        self.max_nodes = config.tokens
        self._texts: list[TextIndex] = []
        self._fused: FusedSteps | None = None
        self._entered: int | None = None  # the sequence whose steps are fused
        if (
            isinstance(decoder, NativeDecoder)
            and decoder.supports_fused
            and FusedSteps.can_draft(config.tokens)
        ):
            self._stream = abi.new(
                "Stream",
                shape=decoder.shape,
                layers=decoder.packed_layers,
                table=decoder.table.data_ptr(),
            )
            ngram = abi.new("NgramLimits", longest=config.max_ngram)
            limits = abi.new("DraftLimits", nodes=config.tokens, ngram=ngram)
            self._fused = FusedSteps(decoder, self._stream, None, limits, refresh=False)

    def begin(self, cache: KVCache, sampler: Sampler) -> None:
        """Forgets the n-grams of the generation before."""
        self._texts = [TextIndex(self.config.max_ngram) for _ in sampler.tokens]
        self._sampler, self._entered = sampler, None
        if self._fused is not None:
            assert isinstance(cache, NativeKVCache)
            self._fused.begin(cache, None, sampler)

    def usable(self, cache: KVCache, length: int) -> int:
        return length  # the index is made anew from the tokens

    def draft(
        self,
        seqs: Sequence[int],
        last_tokens: Sequence[int],
        limits: Sequence[int],
        sampler: Sampler,
    ) -> list[Draft]:
        """See Drafter. The draft is empty where not even the last token occurred before."""
        tokens = self.config.tokens
        return [
            Draft.chain(self._texts[b].look_up(sampler.tokens[b], min(limit, tokens))[0])
            for b, limit in zip(seqs, limits, strict=True)
        ]

    def fused_step(self, seq: int, last_token: int, limit: int) -> FusedStep | None:
        if self._fused is None:
            return None
        if self._entered != seq:
            self._fused.enter(seq, [last_token], text=self._sampler.tokens[seq])
            self._entered = seq
        return self._fused.run(min(limit, self.config.tokens))
