"""One `generate` call: checked prompts, the prefill, emitted tokens. What both decoding loops share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.prefix_cache import Conversation
from multirate.decoding.results import DecodeStats, GenerationOutput, OnTokens
from multirate.decoding.sampler import Sampler
from multirate.decoding.stopping import StopSettings, StopTracker
from multirate.errors import UserError
from multirate.model.decoder import Decoder
from multirate.model.kv_cache import KVCache
from multirate.model.rows import Rows

_PREFILL_ROWS = 1024  # rows of one prefill call; bounds the memory of masks and activations
_EAGER_SLOTS = 1024  # cache slots for new tokens allocated at once; the cache doubles when they are used up
_NEXT_TURN_SLOTS = 512  # more of them where a conversation may go on in the same cache


class Session:
    """State of one generation over a batch of prompts.

    conversation: what an earlier generation of one sequence left. A single prompt that begins with the same tokens goes
    on in its cache; usable(cache, n) says how many of the n tokens in common the drafter can go on from.
    `stats.resumed` of them are not read again. The finished generation is left there in turn.
    Raises UserError for an empty prompt, a token id outside the vocabulary, a prompt longer than the context.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings | None,
        stop: StopSettings | None,
        on_tokens: OnTokens | None = None,
        draft_slots: int = 0,
        conversation: Conversation | None = None,
        usable: Callable[[KVCache, int], int] | None = None,
    ) -> None:
        self._started = time.perf_counter()
        facts = decoder.facts
        for b, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise UserError(f"prompt {b} is empty; accepted are prompts of at least one token")
            if min(prompt) < 0 or max(prompt) >= facts.vocab_size:
                raise UserError(f"prompt {b} has a token id outside 0..{facts.vocab_size - 1} (the model's vocabulary)")
        self.decoder = decoder
        self.sampler = Sampler(sampling or SamplingSettings(), prompts)
        self.stops = StopTracker(stop or StopSettings(), [len(p) for p in prompts], facts.max_positions)
        self.stats = DecodeStats()
        self._on_tokens = on_tokens
        self.active = [b for b in range(len(prompts)) if self.stops.remaining(b) > 0]
        slots = [len(p) + min(self.stops.total_room(b), _EAGER_SLOTS) for b, p in enumerate(prompts)]
        self._conversation = conversation if len(prompts) == 1 else None
        self.cache = self._cache_for(max(slots, default=0) + draft_slots, usable)

    def _cache_for(self, capacity: int, usable: Callable[[KVCache, int], int] | None) -> KVCache:
        """The conversation's cache where the prompt goes on from it, else an empty one."""
        kept, tokens = self._conversation, self.sampler.tokens
        if kept is not None:
            shared = kept.shared(tokens[0])
            cache = kept.take()
            if cache is not None:
                # The last token in common is read again: a drafter may need its final residual.
                if shared and (resumed := (shared if usable is None else usable(cache, shared)) - 1) > 0:
                    self.stats.resumed = resumed
                    cache.truncate(0, resumed)
                    cache.reserve(capacity)
                    return cache
                self.decoder.release_cache(cache)
            limit = self.decoder.facts.max_positions or capacity + _NEXT_TURN_SLOTS
            capacity = max(capacity, min(capacity + _NEXT_TURN_SLOTS, limit))
        return self.decoder.new_cache(len(tokens), capacity)

    def prefill(self) -> list[Tensor]:
        """Reads the prompts of the active sequences into the cache → their final residuals h_L, [T_b, d] each (of a
        prompt that goes on from a conversation: without its first `stats.resumed` tokens)."""
        pieces: list[list[Tensor]] = []
        batch: list[tuple[Rows, list[int], list[Tensor]]] = []
        waiting = 0

        def flush() -> None:
            if not batch:
                return
            rows = Rows.concat([rows for rows, _, _ in batch])
            ids = [token for _, part, _ in batch for token in part]
            hidden = self.forward(ids, rows)
            for (part_rows, _, out), part in zip(batch, hidden.split([len(r) for r, _, _ in batch]), strict=True):
                out.append(part)
                self.cache.commit(int(part_rows.seq[0]), len(part_rows))
            batch.clear()

        for b in self.active:
            out: list[Tensor] = []
            pieces.append(out)
            prompt = self.sampler.tokens[b]
            for start in range(self.stats.resumed, len(prompt), _PREFILL_ROWS):
                part = prompt[start : start + _PREFILL_ROWS]
                if waiting + len(part) > _PREFILL_ROWS:
                    flush()
                    waiting = 0
                batch.append((Rows.causal(b, start, len(part)), part, out))
                waiting += len(part)
        flush()
        return [out[0] if len(out) == 1 else torch.cat(out) for out in pieces]

    def first_tokens(self, hidden_final: Sequence[Tensor]) -> None:
        """Emits each active sequence's first token from the prefill's final residuals, list of [T_b, d]."""
        seqs = list(self.active)
        last = torch.stack([hidden[-1] for hidden in hidden_final])
        for b, token in zip(seqs, self.sampler.choose(self.decoder.logits(last), seqs), strict=True):
            self.emit(b, [token])
        self.stats.first_tokens = len(seqs)
        self.stats.prefill_seconds = time.perf_counter() - self._started
        self.drop_finished()

    def forward(self, ids: list[int], rows: Rows, stop: int | None = None) -> Tensor:
        """Embeds ids [N] and runs layers [0, stop) on `rows` (None: all layers) → [N, d]."""
        facts = self.decoder.facts
        x = self.decoder.embed(torch.tensor(ids, device=facts.device), rows.pos)
        return self.decoder.layers(x, rows, 0, facts.num_layers if stop is None else stop, self.cache)

    def emit(self, seq: int, block: list[int]) -> int:
        """Appends a block of tokens to a sequence, cut where it ends; streams them; returns how many were kept."""
        kept = self.stops.push(seq, block)
        self.sampler.tokens[seq] += kept
        self.stats.tokens += len(kept)
        if self._on_tokens is not None and kept:
            self._on_tokens(seq, kept)
        return len(kept)

    def drop_finished(self) -> None:
        """Finished sequences leave the batch; their cache stays as it is."""
        reasons = self.stops.reasons
        self.active = [b for b in self.active if reasons[b] is None]

    def output(self) -> GenerationOutput:
        """The result, once no sequence is active."""
        self.stats.seconds = time.perf_counter() - self._started
        reasons = [reason for reason in self.stops.reasons if reason is not None]
        assert len(reasons) == len(self.stops.reasons), "a sequence has not ended"
        if self._conversation is not None:
            self._conversation.keep(self.sampler.tokens[0], self.cache)
        else:
            self.decoder.release_cache(self.cache)
        return GenerationOutput(self.stops.new_tokens, reasons, self.stats)
