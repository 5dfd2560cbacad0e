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
from multirate.model.cuda.recorded_rows import StaticSlots
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
        self._record_on(decoder)

    def begin(self, cache: KVCache) -> None:
        """A new generation over the slow residual's `cache`."""
        self._begin(cache, None if self._block is None else self._block.attn)

    @torch.no_grad()
    def step(
        self, ids: list[int], rows: Rows, carried: Tensor | None, fresh: int
    ) -> tuple[Tensor, Tensor]:
        h0 = self.decoder.embed(torch.tensor(ids, device=self.decoder.info.device), rows.pos)
        dtype, n = self.decoder.info.dtype, len(ids)
        carried = None if carried is None else carried.to(dtype)
        p = self._started(h0.to(dtype), carried).to(h0.dtype)
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
        x = p.to(dtype)
        if carried is None:
            return h_gate, self._at_gate(x, None, rows, self._own).to(p.dtype)
        return h_gate, self._own_rows(self._at_gate, rows, x, carried).to(p.dtype)

    def _started(self, h0: Tensor, carried: Tensor | None) -> Tensor:
        """p_0 [n, d]."""
        if self._recorded is None or carried is None:
            return self.stream.start(h0, carried)
        return self._recorded.alone("start", self.stream.start, h0, carried)

    def _at_gate(
        self, p: Tensor, carried: Tensor | None, rows: Rows | StaticSlots, cache: KVCache | None
    ) -> Tensor:
        """Fusion and block, [n, d] → [n, d]. rows, cache: as of GateBlock.rows."""
        p = self.stream.fuse(self.gate, p, carried)
        return p if self._block is None else self._block.rows(p, rows, cache)

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
