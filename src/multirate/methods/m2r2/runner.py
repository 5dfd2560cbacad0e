"""One drafting step of the accelerated stream: both streams through the shallow layers in one pass.

`StreamRunner` runs it on any Decoder with the stream's torch modules; `NativeStreamRunner`
(native_runner.py) does the same in one kernel call. The drafter does not know which it drives.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from multirate.methods.common.reduced_head import draft_logits
from multirate.methods.m2r2.modules import AcceleratedStream
from multirate.model.decoder import Decoder
from multirate.model.kv_cache import KVCache
from multirate.model.noise import Noise, with_noise
from multirate.model.rows import Rows


class StreamRunner:
    """Runs gate `gate` of `stream` beside `decoder`. Owns the block's keys and values.

    keys_only: of the slow rows `step` leaves only the keys and values that drafts read; before they
    are verified they run through the layers below the gate.
    """

    keys_only: bool = False

    def __init__(self, decoder: Decoder, stream: AcceleratedStream, gate: int) -> None:
        self.decoder, self.gate = decoder, gate
        self.stream = stream.to(device=decoder.info.device, dtype=decoder.info.dtype).eval()
        self.adapters = {i: a for i, a in stream.layer_adapters().items() if i < gate} or None
        self._block = stream.block(gate)
        self._arla = None if stream.arla is None else copy.deepcopy(stream.arla).float()
        self._slow_cache: KVCache | None = None
        self._block_cache: KVCache | None = None
        self._tokens = (
            None if stream.draft_tokens is None else stream.draft_tokens.to(decoder.info.device)
        )

    def begin(self, cache: KVCache) -> None:
        """A new generation over the slow residual's `cache`."""
        self._slow_cache = cache
        self._block_cache = (
            None if self._block is None else self._block.new_cache(cache.batch, cache.capacity)
        )

    @property
    def _cache(self) -> KVCache:
        assert self._slow_cache is not None, "begin was not called"
        return self._slow_cache

    def serves(self, cache: KVCache) -> bool:
        """Whether the block's K/V are those of `cache`: no other generation, and no trial step, has
        begun since.
        """
        return cache is self._slow_cache

    def step(
        self, ids: list[int], rows: Rows, carried: Tensor | None, fresh: int
    ) -> tuple[Tensor, Tensor]:
        """Accelerated rows of tokens ids [N] at `rows` (slots as the slow residual's), carried
        residuals [N, d].

        The last `fresh` rows are new to the slow residual as well: it runs beside them and writes
        its K/V. Rows before them refresh the block's K/V of tokens that are committed already. →
        (slow residuals h_G of the fresh rows [fresh, d], unless keys_only; the stream's outputs p
        [N, d])
        """
        h0 = self.decoder.embed(torch.tensor(ids, device=self.decoder.info.device), rows.pos)
        n = len(ids)
        p = self.stream.start(
            h0.to(self.decoder.info.dtype),
            None if carried is None else carried.to(self.decoder.info.dtype),
        ).to(h0.dtype)
        reading = replace(rows, slot=np.full(n, -1, np.int32), accelerated=np.ones(n, np.bool_))
        if fresh:
            new = slice(n - fresh, n)
            slow = Rows(
                rows.seq[new], rows.slot[new], rows.pos[new], rows.prefix[new], rows.tree[new]
            )
            both = Rows.concat([slow, reading])
            x = self.decoder.layers(
                torch.cat([h0[new], p]), both, 0, self.gate, self._cache, self.adapters
            )
            h_gate, p = x[:fresh], x[fresh:]
        else:
            p = self.decoder.layers(p, reading, 0, self.gate, self._cache, self.adapters)
            h_gate = p[:0]
        p = self.stream.fuse(
            self.gate,
            p.to(self.decoder.info.dtype),
            None if carried is None else carried.to(self.decoder.info.dtype),
        ).to(p.dtype)
        if self._block is not None and self._block_cache is not None:
            p = self._block.rows(p.to(self.decoder.info.dtype), rows, self._block_cache).to(p.dtype)
        return h_gate, p

    def slow(self, ids: list[int], rows: Rows) -> Tensor:
        """The slow residual alone through layers < gate → h_G [N, d]."""
        x = self.decoder.embed(torch.tensor(ids, device=self.decoder.info.device), rows.pos)
        return self.decoder.layers(x, rows, 0, self.gate, self._cache)

    def logits(self, p: Tensor) -> Tensor:
        """float32 [n, V]; tokens outside a reduced draft vocabulary get −inf."""
        return draft_logits(self.decoder, self._tokens, p)

    def agreement(self, p: Tensor) -> list[float]:
        """ARLA's probability, for each row of p [n, d] at the first gate, that its argmax is the
        full model's.
        """
        assert self._arla is not None
        scores: list[float] = self._arla.score(self.decoder.norm(p)[:, None].float()).tolist()
        return scores

    def top(
        self,
        p: Tensor,
        count: int,
        sharpness: float = 1.0,
        noise: Sequence[Noise] | None = None,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The `count` likeliest tokens of each row and their probabilities under softmax(sharpness
        · logits). noise[i]: added to the logits of row i.
        """
        logits = self.logits(p)
        if noise is not None:
            logits = with_noise(logits, noise)
        logits = sharpness * logits
        best, ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
        return ids.tolist(), torch.exp(best - logits.logsumexp(-1, keepdim=True)).tolist()
