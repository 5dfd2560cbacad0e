"""One drafting step of the accelerated residual stream: both streams through the shallow layers in
one pass.

`StreamRunner` runs it on any Decoder with the stream's torch modules.
"""

from __future__ import annotations

import copy

from torch import Tensor

from multirate.methods._shared.draft_runner import DraftRunner
from multirate.methods.m2r2.modules import AcceleratedStream
from multirate.runtime.captured import Level, StaticSlots
from multirate.runtime.decoder import Decoder
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import Rows


class StreamRunner(DraftRunner):
    """Runs gate `gate` of `stream` beside `decoder`."""

    streams = 2

    def __init__(self, decoder: Decoder, stream: AcceleratedStream, gate: int) -> None:
        self.decoder, self.gate, self.first_layers = decoder, gate, gate
        self.module = stream.to(device=decoder.info.device, dtype=decoder.info.dtype).eval()
        self.adapters = {i: a for i, a in stream.layer_adapters().items() if i < gate} or None
        self.taps = stream.config.taps
        self._block = stream.block(gate)
        self._arla = None if stream.arla is None else copy.deepcopy(stream.arla).float()
        self._capture_on(decoder)

    def begin(self, cache: KVCache) -> None:
        """Starts a new generation over the slow residual's `cache`."""
        self._begin(cache, None if self._block is None else self._block.attn)

    def level_of(
        self, embedded: Tensor, carried: Tensor | None, level: Level
    ) -> tuple[Tensor, Tensor]:
        dtype = self.decoder.info.dtype
        carried = None if carried is None else carried.to(dtype)
        p = self.module.start(embedded.to(dtype), carried).to(embedded.dtype)
        h_gate, p = level.both(embedded, p)
        return h_gate, level.own(self._at_gate, p.to(dtype), carried).to(p.dtype)

    def _at_gate(
        self, p: Tensor, carried: Tensor | None, rows: Rows | StaticSlots, cache: KVCache | None
    ) -> Tensor:
        """Fusion and block, [n, d] → [n, d]. rows, cache: as of DecoderBlock.rows."""
        p = self.module.fuse(self.gate, p, carried)
        return p if self._block is None else self._block.rows(p, rows, cache)

    def logits(self, p: Tensor) -> Tensor:
        """float32 [n, V]; −inf for tokens outside a reduced draft vocabulary."""
        return self.module.logits(self.decoder, p)

    def agreement(self, p: Tensor) -> list[float]:
        """ARLA's probability, for each row of p [n, d] at the first gate, that its argmax equals
        the full model's.
        """
        assert self._arla is not None
        scores: list[float] = self._arla.score(self.decoder.norm(p)[:, None].float()).tolist()
        return scores
