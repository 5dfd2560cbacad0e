"""The state of one `generate` call, which every kind of step works on: checked prompts, cache,
emitted tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.prefill import PREFILL_ROWS, read_in_pieces
from multirate.decoding.prefix_cache import MIN_SHARED, PrefixCache
from multirate.decoding.prompts import as_list, as_lists
from multirate.decoding.results import DecodeStats, GenerationOutput, OnTokens, Origin
from multirate.decoding.sampler import Observe, Sampler
from multirate.decoding.stopping import StopSettings, StopTracker
from multirate.errors import UserError
from multirate.runtime.decoder import Decoder
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import Rows

_EAGER_SLOTS = (
    1024  # cache slots for new tokens allocated at once; the cache doubles when they are used up
)
_NEXT_TURN_SLOTS = 512  # more of them where a later turn may go on in the same cache


OnEmitted = Callable[[int, list[int], Sequence[Origin]], None]


class Session:
    """State of one generation over a batch of prompts.

    Attributes:

    prompts: the given prompts.
    cache: K/V of prompts and emitted tokens.
    sampler: the tokens so far; chooses the next ones.
    active: the sequences that have not ended.
    refilled: whether other sequences take the place of those that end.
    draft_limits: by sequence, how many tokens a step may draft for it, where that is limited.
    stops, stats: a StopTracker and a DecodeStats.
    each: the stats of each sequence by itself, without times.
    on_emitted: called with a sequence's new tokens and their origins; None: not called.

    Arguments:

    draft_slots: cache slots beyond prompt and new tokens that a step may write.
    prefix_cache: K/V that an earlier generation of one sequence left. A single prompt that begins
        with the same tokens continues in its cache, and `stats.resumed` of its tokens are not read
        again. The finished generation leaves its exact K/V there.
    usable: usable(cache, n) returns how many of the n common tokens the step can continue from.
    places: instead of prompts: so many free places, which sequences take with `join`.

    Raises UserError for an empty prompt, a token id outside the vocabulary, or a prompt longer than
    the context.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings | None,
        stop: StopSettings | None,
        on_tokens: OnTokens | None = None,
        draft_slots: int = 0,
        prefix_cache: PrefixCache | None = None,
        usable: Callable[[KVCache, int], int] | None = None,
        places: int = 0,
    ) -> None:
        self._started = time.perf_counter()
        info = decoder.info
        prompts = as_lists(prompts)
        for b, prompt in enumerate(prompts):
            _check_prompt(b, prompt, info.vocab_size)
        prompts += [[] for _ in range(places)]
        self.decoder, self.refilled = decoder, bool(places)
        self.prompts = prompts
        self.sampler = Sampler(sampling or SamplingSettings(), prompts, decoder.noisy_argmax)
        self.stops = StopTracker(
            stop or StopSettings(),
            [len(p) for p in prompts],
            info.max_positions,
            "the context" if info.claimed_positions is None else info.context,
        )
        self.stats = DecodeStats()
        self.each = [DecodeStats() for _ in prompts]
        self.on_emitted: OnEmitted | None = None
        self._on_tokens = on_tokens
        self._inexact_from: dict[int, int] = {}
        self.draft_limits: dict[int, int] = {}
        for b in range(places):
            self.stops.end(b)
        self.active = [b for b in range(len(prompts)) if self.stops.remaining(b) > 0]
        slots = [
            len(p) + min(self.stops.total_room(b), _EAGER_SLOTS) for b, p in enumerate(prompts)
        ]
        self._prefix_cache = prefix_cache if len(prompts) == 1 else None
        self._whole_pieces = decoder.pass_dependent is not None
        if self._prefix_cache is not None and self._whole_pieces:
            # A later prompt's whole pieces are these again; what follows shares other passes there.
            # One token more: the last in common is read again.
            self.note_inexact(0, _in_pieces(len(prompts[0])) + 1)
        self.cache = self._cache_for(max(slots, default=0) + draft_slots, usable)

    def _cache_for(self, capacity: int, usable: Callable[[KVCache, int], int] | None) -> KVCache:
        """The kept cache if the prompt continues from it, else an empty one."""
        kept, tokens = self._prefix_cache, self.sampler.tokens
        if kept is not None:
            shared = kept.shared(tokens[0])
            cache = kept.take()
            if cache is not None:
                # The last token in common is read again: a step may need its final residual.
                resumed = (shared if usable is None else usable(cache, shared)) - 1 if shared else 0
                if self._whole_pieces:
                    resumed = _in_pieces(resumed)
                if resumed > 0:
                    self.stats.resumed = resumed
                    cache.truncate(0, resumed)
                    cache.reserve(capacity)
                    return cache
                self.decoder.release_cache(cache)
            limit = self.decoder.info.max_positions or capacity + _NEXT_TURN_SLOTS
            capacity = max(capacity, min(capacity + _NEXT_TURN_SLOTS, limit))
        return self.decoder.new_cache(len(tokens), capacity)

    def join(
        self,
        seq: int,
        prompt: Sequence[int],
        number: int,
        sampling: SamplingSettings | None = None,
        stop: StopSettings | None = None,
        observe: Observe | None = None,
    ) -> None:
        """Puts another prompt in a place whose sequence has ended. It becomes active with its first
        token, when its prompt has been read. It is the `number`-th prompt of its seed, counted from
        0. sampling, stop: its own settings; None: those of all. observe: as `Sampler.restart`.
        Raises UserError for a prompt that cannot be used; the place is still free then.
        """
        assert seq not in self.active, "the sequence has not ended"
        prompt = as_list(number, prompt)
        _check_prompt(number, prompt, self.decoder.info.vocab_size)
        self.stops.restart(seq, len(prompt), stop)
        self.sampler.restart(seq, prompt, number, sampling, observe)
        self.prompts[seq] = prompt
        self.cache.truncate(seq, 0)
        self._inexact_from.pop(seq, None)
        self.each[seq] = DecodeStats()

    def leave(self, seq: int) -> None:
        """The sequence ends, whatever it has emitted; its place is free."""
        self.stops.end(seq)
        self.active = [b for b in self.active if b != seq]
        self.draft_limits.pop(seq, None)

    def prefill(
        self,
        taps: Sequence[int] = (),
        seqs: Sequence[int] | None = None,
    ) -> tuple[list[Tensor], list[dict[int, Tensor]]]:
        """Reads the prompts of the sequences `seqs` (None: all active ones) into the cache.

        Returns their final residuals h_L, [T_b, d] each, and the residuals entering the layers
        `taps`, [T_b, d] each. A prompt that continues from a kept cache comes without its first
        `stats.resumed` tokens.
        """
        seqs = self.active if seqs is None else seqs
        texts = {b: self.sampler.tokens[b] for b in seqs}
        pieces: dict[int, list[Mapping[int, Tensor]]] = {b: [] for b in seqs}
        for b, states in read_in_pieces(
            self.decoder, self.cache, texts, taps, start=self.stats.resumed
        ):
            pieces[b].append(states)
        last = self.decoder.info.num_layers
        joined = [
            {layer: _joined([one[layer] for one in pieces[b]]) for layer in (*taps, last)}
            for b in seqs
        ]
        return (
            [states[last] for states in joined],
            [{layer: states[layer] for layer in taps} for states in joined],
        )

    def first_tokens(
        self, hidden_final: Sequence[Tensor], seqs: Sequence[int] | None = None
    ) -> None:
        """Emits the first token of each sequence of `seqs` (None: all active ones) from its
        prefill's final residuals, a list of [T_b, d].
        """
        seqs = list(self.active if seqs is None else seqs)
        last = torch.stack([hidden[-1] for hidden in hidden_final])
        for b, token in zip(
            seqs, self.sampler.choose(self.decoder.logits(last), seqs), strict=True
        ):
            self.emit(b, [token])
        if not self.stats.first_tokens:
            self.stats.prefill_seconds = time.perf_counter() - self._started
        self.stats.first_tokens += len(seqs)
        self.active = sorted({*self.active, *seqs})
        self.drop_finished()

    def forward(self, ids: list[int], rows: Rows, stop: int | None = None) -> Tensor:
        """Embeds ids [N] and runs layers [0, stop) on `rows` (None: all layers) → [N, d]."""
        stop = self.decoder.info.num_layers if stop is None else stop
        return self.decoder.first_layers(ids, rows, stop, self.cache)

    def emit(self, seq: int, block: list[int], origins: Sequence[Origin] = ("model",)) -> int:
        """Appends a block of tokens to a sequence, cut where it ends, and streams them. Returns how
        many were kept.
        """
        kept = self.stops.push(seq, block)
        self.sampler.tokens[seq] += kept
        self.stats.tokens += len(kept)
        self.each[seq].tokens += len(kept)
        if self._on_tokens is not None and kept:
            self._on_tokens(seq, kept)
        if self.on_emitted is not None and kept:
            self.on_emitted(seq, kept, origins[: len(kept)])
        return len(kept)

    def count_steps(self) -> None:
        """One pass of all active sequences begins."""
        self.stats.target_passes += 1
        self.stats.sequence_steps += len(self.active)
        for b in self.active:
            self.each[b].sequence_steps += 1

    def count_draft(self, seq: int, drafted: int, levels: int, accepted: int) -> None:
        """As `DecodeStats.count_draft`, of a sequence."""
        self.stats.count_draft(drafted, levels, accepted)
        self.each[seq].count_draft(drafted, levels, accepted)

    def most_drafted(self, seq: int) -> int:
        """How many tokens of a draft are of use: the sequence may emit one more."""
        room = self.stops.remaining(seq) - 1
        return min(room, self.draft_limits.get(seq, room))

    def note_inexact(self, seq: int, token: int) -> None:
        """Marks the sequence's K/V, from its `token`-th token on (counted from 0), as different
        from those of a prefill through all layers. Later tokens have read them.
        """
        self._inexact_from[seq] = min(token, self._inexact_from.get(seq, token))

    def exact_length(self, seq: int) -> int:
        """How many of the sequence's committed tokens have the K/V that a prefill through all
        layers writes.
        """
        length = self.cache.lengths[seq]
        return min(length, self._inexact_from.get(seq, length))

    @property
    def keeps_prefix(self) -> bool:
        """Whether a later generation may use the cache."""
        return self._prefix_cache is not None

    def drop_finished(self) -> None:
        """Removes finished sequences from the batch; their cache stays as it is."""
        reasons = self.stops.reasons
        self.active = [b for b in self.active if reasons[b] is None]

    def output(self) -> GenerationOutput:
        """The result, once no sequence is active."""
        self.stats.seconds = time.perf_counter() - self._started
        reasons = [reason for reason in self.stops.reasons if reason is not None]
        assert len(reasons) == len(self.stops.reasons), "a sequence has not ended"
        if self._prefix_cache is not None and self.exact_length(0) >= MIN_SHARED:
            # a later turn must not see K/V of layers that were skipped
            self.cache.truncate(0, self.exact_length(0))
            self._prefix_cache.keep(self.sampler.tokens[0], self.cache)
        else:
            self.decoder.release_cache(self.cache)
        return GenerationOutput(self.stops.new_tokens, reasons, self.stats)


def _in_pieces(tokens: int) -> int:
    """How many of the first `tokens` tokens lie in whole pieces of a prefill."""
    return tokens // PREFILL_ROWS * PREFILL_ROWS


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check_prompt(number: int, prompt: list[int], vocab_size: int) -> None:
    if len(prompt) == 0:
        raise UserError(f"prompt {number} is empty; accepted: prompts of at least one token")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise UserError(
            f"prompt {number} has a token id outside 0..{vocab_size - 1} (the model's vocabulary)"
        )
