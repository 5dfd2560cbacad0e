"""Drafts by looking the last n tokens up in prompt and output [Saxena 2023]. No model, no training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from multirate.backbone.decoder import Decoder
from multirate.backbone.kv_cache import KVCache
from multirate.decoding.drafter import Draft, Drafter
from multirate.decoding.sampler import Sampler
from multirate.methods.prompt_lookup.config import PromptLookupConfig
from multirate.methods.registry import register


class PromptLookupDrafter(Drafter):
    """The longest n-gram (n ≤ max_ngram) that occurred before proposes what followed its latest occurrence.

    An index of all n-grams grows with the output, so a round costs the same however long the context is.
    """

    start = 0

    def __init__(self, config: PromptLookupConfig) -> None:
        self.config = config
        self.max_nodes = config.tokens
        self._follows: list[dict[tuple[int, ...], int]] = []
        self._indexed: list[int] = []

    def begin(self, cache: KVCache, sampler: Sampler) -> None:
        """Forgets the n-grams of the generation before."""
        self._follows = [{} for _ in sampler.tokens]
        self._indexed = [0] * len(sampler.tokens)

    def kept(self, cache: KVCache, length: int) -> int:
        return length  # the index is made anew from the tokens

    def draft(self, seqs: Sequence[int], roots: Sequence[int], limits: Sequence[int], sampler: Sampler) -> list[Draft]:
        """See Drafter. The draft is empty where not even the last token occurred before."""
        return [
            Draft.chain(self._continuation(b, sampler.tokens[b])[:limit]) for b, limit in zip(seqs, limits, strict=True)
        ]

    def _continuation(self, seq: int, tokens: list[int]) -> list[int]:
        follows = self._follows[seq]
        # the n-grams ending in the last token are left out: they are what is looked up
        for end in range(self._indexed[seq] + 1, len(tokens)):
            for n in range(1, min(self.config.max_ngram, end) + 1):
                follows[tuple(tokens[end - n : end])] = end
        self._indexed[seq] = len(tokens) - 1
        for n in range(min(self.config.max_ngram, len(tokens)), 0, -1):
            start = follows.get(tuple(tokens[-n:]))
            if start is not None:
                return tokens[start : start + self.config.tokens]
        return []


@register("prompt_lookup", "drafts what followed the last few tokens earlier in the text", PromptLookupConfig)
def _prompt_lookup(decoder: Decoder, accelerator: Any, config: PromptLookupConfig) -> Drafter:
    return PromptLookupDrafter(config)
