"""One drafting step of the accelerated stream: both streams through the shallow layers in one pass.

`StreamRunner` runs it on any Decoder with the stream's torch modules; `NativeStreamRunner`
(native_runner.py) does the same in one kernel call. The drafter does not know which it drives.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from multirate.methods.common.draft_runner import DraftRunner
from multirate.methods.m2r2.modules import AcceleratedStream
from multirate.model.decoder import Decoder
from multirate.model.kv_cache import KVCache
from multirate.model.rows import Rows


class StreamRunner(DraftRunner):
    """Runs gate `gate` of `stream` beside `decoder`."""

    def __init__(self, decoder: Decoder, stream: AcceleratedStream, gate: int) -> None:
        self.decoder, self.gate = decoder, gate
        self.stream = stream.to(device=decoder.info.device, dtype=decoder.info.dtype).eval()
        self.adapters = {i: a for i, a in stream.layer_adapters().items() if i < gate} or None
        self.taps = stream.config.taps
        self._block = stream.block(gate)
        self._arla = None if stream.arla is None else copy.deepcopy(stream.arla).float()
        self._block_cache: KVCache | None = None

    def begin(self, cache: KVCache) -> None:
        """A new generation over the slow residual's `cache`."""
        self._slow_cache = cache
        self._block_cache = (
            None if self._block is None else self._block.new_cache(cache.batch, cache.capacity)
        )

    def step(
        self, ids: list[int], rows: Rows, carried: Tensor | None, fresh: int
    ) -> tuple[Tensor, Tensor]:
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
        return self.stream.logits(self.decoder, p)

    def agreement(self, p: Tensor) -> list[float]:
        """ARLA's probability, for each row of p [n, d] at the first gate, that its argmax is the
        full model's.
        """
        assert self._arla is not None
        scores: list[float] = self._arla.score(self.decoder.norm(p)[:, None].float()).tolist()
        return scores
