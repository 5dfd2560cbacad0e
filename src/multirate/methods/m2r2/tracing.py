"""The accelerated residual stream at every layer of a text, for `multirate inspect`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multirate.methods._shared.branch_tracing import BranchTracer, Interval
from multirate.methods.m2r2.decode import arla_of
from multirate.methods.m2r2.decode_config import M2R2DecodeConfig
from multirate.methods.m2r2.modules import AcceleratedStream
from multirate.runtime.decoder import Decoder
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import Rows


class M2R2Tracer(BranchTracer):
    """The first draft step after every token of a text, with the model's own carried residuals.

    Scores: "confidence", the top-1 probability by which drafts are judged, and "ARLA" if the
    accelerator has it.
    """

    def __init__(self, decoder: Decoder, stream: AcceleratedStream) -> None:
        info = decoder.info
        self._decoder = decoder
        self._stream = stream.to(device=info.device, dtype=info.dtype).eval()
        self._adapters = stream.layer_adapters() or None
        self._arla = None if stream.arla is None else arla_of(stream)
        self._sharpness = M2R2DecodeConfig.SHARPNESS
        self.gates = stream.config.gates
        self._cache: KVCache | None = None
        self._block_caches: dict[int, KVCache] = {}
        self._last: Tensor | None = None  # what is carried of the token before

    def begin(self, cache: KVCache) -> None:
        self._cache, self._last, self._block_caches = cache, None, {}
        for gate in self.gates:
            block = self._stream.block(gate)
            if block is not None:
                self._block_caches[gate] = block.attn.new_cache(cache.batch, cache.capacity)

    @torch.no_grad()
    def trace(self, ids: Sequence[int], start: int, residuals: Sequence[Tensor]) -> list[Interval]:
        assert self._cache is not None, "begin was not called"
        stream, dtype = self._stream, self._decoder.info.dtype
        inner = {tap: residuals[tap].to(dtype) for tap in stream.config.taps}
        own = stream.carried(residuals[-1].to(dtype), inner)
        before = torch.zeros_like(own[:1]) if self._last is None else self._last
        carried = torch.cat([before, own[:-1]])
        self._last = own[-1:].clone()
        slots = range(start, start + len(ids))
        reading, causal = Rows.accelerated_at(0, slots), Rows.causal(0, start, len(ids))
        p = stream.start(residuals[0].to(dtype), carried).to(residuals[0].dtype)
        normed: list[Tensor] = []
        intervals, previous = [], 0
        for gate in self.gates:
            if previous and stream.config.reinitialise:
                p = residuals[previous]
            states = [p]
            for layer in range(previous, gate):
                p = self._decoder.layers(p, reading, layer, layer + 1, self._cache, self._adapters)
                states.append(p)
            p = stream.fuse(gate, p.to(dtype), carried).to(p.dtype)
            block = stream.block(gate)
            if block is not None:
                p = block.rows(p.to(dtype), causal, self._block_caches[gate]).to(p.dtype)
            logits = stream.logits(self._decoder, p)
            top = torch.softmax(self._sharpness * logits, dim=-1).amax(dim=-1)
            scores = {"confidence": top.tolist()}
            if self._arla is not None:
                normed.append(self._decoder.norm(p).float())
                scores["ARLA"] = self._arla.score(torch.stack(normed, dim=1)).tolist()
            intervals.append(Interval(previous, gate, states, p, logits, scores))
            previous = gate
        return intervals
