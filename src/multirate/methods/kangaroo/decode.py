"""Kangaroo as a drafter: chains from the exit layer and its adapter, stopped by low confidence; the
rest verifies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from multirate.decoding.drafter import Draft, Drafter, FusedStep, Verified
from multirate.decoding.sampler import Sampler
from multirate.methods.common.config import DraftWeights, MethodConfig
from multirate.methods.common.fused_steps import FusedSteps
from multirate.methods.common.reduced_head import draft_logits
from multirate.methods.kangaroo.modules import KangarooAdapter
from multirate.methods.kangaroo.native import NativeKangarooAdapter
from multirate.model.decoder import Decoder, argmax_rows
from multirate.model.kv_cache import KVCache
from multirate.model.native import NativeDecoder
from multirate.model.native.cache import NativeKVCache
from multirate.model.rows import Rows

_PREFILL_ROWS = 1024


@dataclass(frozen=True)
class KangarooDecodeConfig(MethodConfig):
    """Overrides of the accelerator's own settings; null keeps them."""

    threshold: float | None = None
    """Stop after a token whose top-1 probability is below this."""
    max_draft: int | None = None
    weights: DraftWeights = "int8"
    """Of what only drafts (the adapter and a copy of the head) on the native kernel."""

    def check(self) -> None:
        self.require(
            self.threshold is None or 0 <= self.threshold <= 1, "threshold", "null or 0 to 1"
        )
        self.require(
            self.max_draft is None or self.max_draft >= 1, "max_draft", "null or at least 1"
        )


class KangarooDrafter(Drafter):
    """Layers [0, E) and the adapter draft; layers [E, L) verify the exact residuals that drafting
    left behind.

    The adapter's cache has the K/V of every token it was queried at. A draft's last token is never
    queried; when it is accepted its K/V are back-filled together with the next step's last token.
    """

    def __init__(
        self, decoder: Decoder, adapter: KangarooAdapter, config: KangarooDecodeConfig
    ) -> None:
        # the decoder's residuals decide the dtype: the native kernel keeps them in fp32 whatever
        # the weights are
        probe = decoder.embed(
            torch.zeros(1, dtype=torch.int64, device=decoder.info.device), np.zeros(1, np.int32)
        )
        self.decoder = decoder
        adapter = adapter.to(dtype=probe.dtype)
        self.adapter: KangarooAdapter | NativeKangarooAdapter = adapter
        if NativeKangarooAdapter.supports(decoder, adapter):
            assert isinstance(decoder, NativeDecoder)
            self.adapter = NativeKangarooAdapter(decoder, adapter, config.weights)
        self.start = adapter.config.exit_layer
        self.threshold = adapter.config.threshold if config.threshold is None else config.threshold
        self.max_nodes = config.max_draft or adapter.config.max_draft
        self._fused: FusedSteps | None = None
        if isinstance(self.adapter, NativeKangarooAdapter) and FusedSteps.can_draft(self.max_nodes):
            self._fused = self.adapter.fused_steps(self.start, self.max_nodes, self.threshold)
        self._entered: int | None = None  # the sequence whose steps are fused
        self._cache: KVCache | None = None
        self._own: KVCache | None = None
        self._filled: dict[int, int] = {}  # slots of the adapter's cache that are in place
        self._exits: dict[
            int, Tensor
        ] = {}  # h_E of the last draft's rows [n + 1, d], the last token first
        self._missing: dict[
            int, Tensor
        ] = {}  # h_E of accepted tokens whose adapter K/V are not in place
        # slots [first, last) of prompts that the adapter reads when it drafts first
        self._unread: dict[int, tuple[int, int]] = {}

    def begin(self, cache: KVCache, sampler: Sampler) -> None:
        """Takes the target's cache; a fresh adapter cache."""
        self._cache, self._own = cache, self.adapter.new_cache(cache.batch, cache.capacity)
        self._filled, self._exits, self._missing, self._entered = {}, {}, {}, None
        self._sampler, self._unread = sampler, {}
        if self._fused is not None:
            assert isinstance(cache, NativeKVCache) and isinstance(self._own, NativeKVCache)
            self._fused.begin(cache, self._own, sampler)

    def usable(self, cache: KVCache, length: int) -> int:
        return min(length, self._filled.get(0, 0)) if cache is self._cache else 0

    def resume(self, cache: KVCache, sampler: Sampler) -> None:
        """Goes on in the adapter's cache."""
        self._exits, self._missing, self._entered = {}, {}, None
        self._sampler, self._filled = sampler, {0: cache.lengths[0]}
        self._unread = {0: self._unread[0]} if 0 in self._unread else {}
        if self._own is not None:
            self._own.reserve(cache.capacity)
        if self._fused is not None:
            assert isinstance(cache, NativeKVCache) and isinstance(self._own, NativeKVCache)
            self._fused.begin(cache, self._own, sampler)

    def prefill(
        self,
        seqs: Sequence[int],
        prompts: Sequence[Sequence[int]],
        hidden_final: Sequence[Tensor],
        taps: Sequence[Mapping[int, Tensor]],
    ) -> None:
        """Prompts are read by the adapter when it drafts first: where drafts do not pay, never."""
        for b, prompt, hidden in zip(seqs, prompts, hidden_final, strict=True):
            known = len(prompt) - len(hidden)
            self._unread[b] = min(known, self._unread.get(b, (known, 0))[0]), len(prompt)
            self._filled[b] = len(prompt)

    def _read_prompts(self, seqs: Sequence[int]) -> None:
        """The prompts' adapter K/V, from their exit residuals: layers [0, E) again, over the K/V
        already written.
        """
        assert self._cache is not None and self._own is not None
        for b in seqs:
            first, last = self._unread.pop(b, (0, 0))
            for begin in range(first, last, _PREFILL_ROWS):
                part = self._sampler.tokens[b][begin : min(begin + _PREFILL_ROWS, last)]
                rows = Rows.causal(b, begin, len(part))
                reads = Rows(
                    rows.seq, np.full(len(part), -1, np.int32), rows.pos, rows.prefix, rows.tree
                )
                x = self.decoder.embed(
                    torch.tensor(part, device=self.decoder.info.device), rows.pos
                )
                self.adapter.rows(
                    self.decoder.layers(x, reads, 0, self.start, self._cache), rows, self._own
                )

    def fused_step(self, seq: int, last_token: int, limit: int) -> FusedStep | None:
        """See Drafter. `draft`'s rule, with the accepted tokens' K/V computed again instead of
        back-filled.
        """
        if self._fused is None or self._missing.get(seq) is not None:
            return None  # K/V owed from steps in parts are paid there first
        if self._entered != seq:
            self._fused.enter(seq, [last_token])
            self._entered = seq
        if not limit:
            return self._fused.run(0, stream=False)
        self._read_prompts([seq])
        assert self._cache is not None
        # this step computes again what the last one accepted
        self._filled[seq] = self._cache.lengths[seq]
        return self._fused.run(min(limit, self.max_nodes))

    def behind(self, seqs: Sequence[int]) -> int:
        fused = 0 if self._fused is None or self._entered is None else self._fused.behind
        unread = sum(last - first for first, last in (self._unread.get(b, (0, 0)) for b in seqs))
        return fused + unread + sum(len(self._missing[b]) for b in seqs if b in self._missing)

    def draft(
        self,
        seqs: Sequence[int],
        last_tokens: Sequence[int],
        limits: Sequence[int],
        sampler: Sampler,
    ) -> list[Draft]:
        """See Drafter. Tokens are those that the model would take by these logits, with the noise
        that it will add to its own; the stopping rule keeps the token it stops at.
        """
        count = len(seqs)
        depths = [min(limit, self.max_nodes) for limit in limits]
        if any(depths):
            self._read_prompts(seqs)
        tokens: list[list[int]] = [[] for _ in seqs]
        hidden: list[list[Tensor]] = [[] for _ in seqs]
        stopped = [False] * count
        live, entering = list(range(count)), list(last_tokens)
        for depth in range(1, max(depths, default=0) + 2):
            x = self._shallow([seqs[i] for i in live], entering, depth - 1)
            for row, i in enumerate(live):
                hidden[i].append(x[row : row + 1])
            on = [row for row, i in enumerate(live) if depth <= depths[i] and not stopped[i]]
            if not on:
                break
            live = [live[row] for row in on]
            chosen, paths = [seqs[i] for i in live], [tokens[i] for i in live]
            y = self._query(chosen, x[on], depth - 1)
            if (
                isinstance(self.adapter, NativeKangarooAdapter)
                and not sampler.settings.uses_context
            ):
                noise = None if sampler.greedy else [sampler.noise(b, depth - 1) for b in chosen]
                entering, confidence = self.adapter.top(y, noise)
            else:
                logits = draft_logits(self.decoder, self.adapter.draft_tokens, y)
                logits = sampler.perturbed(logits, chosen, paths)
                confidence = torch.exp(logits.amax(-1) - logits.logsumexp(-1)).tolist()
                entering = argmax_rows(logits)
            for token, sure, i in zip(entering, confidence, live, strict=True):
                tokens[i].append(token)
                stopped[i] = sure < self.threshold
        for i, b in enumerate(seqs):
            self._exits[b] = torch.cat(hidden[i])
        return [Draft.chain(tokens[i], self._exits[b]) for i, b in enumerate(seqs)]

    def accept(self, seq: int, verified: Verified) -> None:
        """Accepted rows are a prefix of the chain; the tail the adapter was not queried at is kept
        for back-filling.
        """
        assert self._cache is not None
        length = self._cache.lengths[seq]  # committed: it includes this path
        before = length - len(verified.path)
        self._filled[seq] = min(self._filled[seq], length)
        first = max(self._filled[seq], before)
        if first < length:
            late = self._exits[seq][first - before : length - before]
            earlier = self._missing.get(seq)  # still there when this step queried nothing
            self._missing[seq] = late if earlier is None else torch.cat([earlier, late])

    def _shallow(self, seqs: list[int], tokens: list[int], depth: int) -> Tensor:
        """Layers [0, E) on one row per sequence, ``depth`` slots after its committed ones → h_E [n,
        d].
        """
        assert self._cache is not None
        rows = _after(self._cache, seqs, depth)
        x = self.decoder.embed(torch.tensor(tokens, device=self.decoder.info.device), rows.pos)
        return self.decoder.layers(x, rows, 0, self.start, self._cache)

    def _query(self, seqs: list[int], exits: Tensor, depth: int) -> Tensor:
        """The adapter at each sequence's row [n, d] → [n, d], after back-filling what is missing
        before it.
        """
        assert self._cache is not None and self._own is not None
        parts, inputs = [], []
        for b in seqs:
            if (late := self._missing.pop(b, None)) is not None:
                parts.append(Rows.causal(b, self._filled[b], len(late)))
                inputs.append(late)
            self._filled[b] = self._cache.lengths[b] + depth + 1
        back = sum(len(p) for p in parts)
        rows = Rows.concat([*parts, _after(self._cache, seqs, depth)])
        return self.adapter.rows(torch.cat([*inputs, exits]), rows, self._own)[back:]


def _after(cache: KVCache, seqs: Sequence[int], depth: int) -> Rows:
    slot = np.array([cache.lengths[b] + depth for b in seqs], np.int32)
    return Rows(
        np.array(seqs, np.int32), slot, slot, slot + np.int32(1), np.zeros(len(seqs), np.int64)
    )
