"""Decoding passes with static shapes, captured once and replayed: CUDA graphs for any model that
HFDecoder runs.

Its logic is tested on CPU with recorders that replay the same static-shape code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from multirate.runtime.captured import CapturedLevels, CapturedRows
from multirate.runtime.cuda.captured_levels import GraphedLevels
from multirate.runtime.cuda.captured_rows import GraphedRows
from multirate.runtime.cuda.fused_norms import FusedNorms
from multirate.runtime.cuda.passes import LayerRun, Pass, StaticRows
from multirate.runtime.cuda.recorder import (
    MAX_CAPTURES,
    CudaRecorder,
    Recorder,
    Replay,
    width_of,
)
from multirate.runtime.cuda.static_cache import StaticKVCache, StaticStorage, round_up
from multirate.runtime.decoder import LayerAdapter, argmax_rows
from multirate.runtime.hf.decoder import HFDecoder, relative_difference, rounding_limit
from multirate.runtime.hf.parts import ModelParts
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.noise import Noise
from multirate.runtime.rows import Rows

MAX_ROWS = 256
"""Padded rows of all sequences together, above which a pass is bound by arithmetic and not by
launching kernels.
"""
FREE_STORAGES = 2
"""Storages that no cache uses, kept with their captures for caches to come; the least recently
used goes first.
"""
_ROUNDINGS = 16.0
"""How much more than another rounding of its inputs a captured pass may change the result, as it
rounds otherwise in every layer.
"""


class GraphedDecoder(HFDecoder):
    """HFDecoder whose short passes (decoding, drafting, verifying) have static shapes and are
    replayed captures.

    A pass is captured once for each storage of a cache, width of rows, attended span, layers
    [start, stop) and adapters. Its first run is compared with HFDecoder's own; a model that cannot
    be captured, or whose capture gives other numbers, runs as HFDecoder from then on, and
    `graph_fallback` says why (None: captures are in use).

    The storages of released and dropped caches are kept and given to the next ones, so that
    captures outlive a generation. A capture holds the weights' addresses: weights may change in
    place, not be replaced (nor may `deltas()`).
    """

    def __init__(self, model: nn.Module, recorder: Recorder | None = None) -> None:
        super().__init__(model)
        self.graph_fallback: str | None = unsupported(self.parts)
        self.norms = FusedNorms(model)
        self.recorder = recorder or CudaRecorder(self.info.device)
        self._storages: list[StaticStorage] = []  # the last used one last

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        if self.graph_fallback is not None:
            return super().new_cache(batch, capacity)
        kept = self._free_storage(batch, capacity)
        cache = StaticKVCache(batch, capacity, self._kv_layout, kept)
        self._note_use(cache.storage)
        return cache

    def captured_rows(self) -> CapturedRows:
        return GraphedRows(self)

    def captured_levels(self) -> CapturedLevels:
        return GraphedLevels(self)

    def release_cache(self, cache: KVCache) -> None:
        if isinstance(cache, StaticKVCache):
            cache.storage.user = None

    @torch.no_grad()
    def layers(
        self,
        x: Tensor,
        rows: Rows,
        start: int,
        stop: int,
        cache: KVCache,
        adapters: Mapping[int, LayerAdapter] | None = None,
    ) -> Tensor:
        used: dict[int, LayerAdapter] = {}
        if adapters and rows.accelerated is not None and rows.accelerated.any():
            used = {i: adapters[i] for i in range(start, stop) if i in adapters}
        found = self._replayed(Pass(start, stop, used), rows, cache, x)
        if found is None:
            return super().layers(x, rows, start, stop, cache, adapters)
        return found[0]

    @torch.no_grad()
    def layers_with_taps(
        self, x: Tensor, rows: Rows, start: int, stop: int, cache: KVCache, taps: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        wanted = tuple(sorted(taps))
        found = None
        if wanted and start <= wanted[0] and wanted[-1] <= stop:
            found = self._replayed(Pass(start, stop, taps=wanted), rows, cache, x)
        if found is None:
            return super().layers_with_taps(x, rows, start, stop, cache, taps)
        *inner, x = found[0].chunk(len(wanted) + 1, dim=-1)
        return x, dict(zip(wanted, inner, strict=True))

    @torch.no_grad()
    def first_layers(self, ids: Sequence[int], rows: Rows, stop: int, cache: KVCache) -> Tensor:
        found = self._replayed(Pass(0, stop, embeds=True), rows, cache, None, ids)
        return super().first_layers(ids, rows, stop, cache) if found is None else found[0]

    @torch.no_grad()
    def next_tokens(
        self,
        rows: Rows,
        cache: KVCache,
        ids: Sequence[int] | None = None,
        x: Tensor | None = None,
        start: int = 0,
        noise: Sequence[Noise] | None = None,
    ) -> tuple[Tensor, list[int]]:
        if noise is None:
            run = Pass(start, self.info.num_layers, embeds=x is None, chooses=True)
            found = self._replayed(run, rows, cache, x, ids)
            if found is not None:
                return found
        return super().next_tokens(rows, cache, ids, x, start, noise)

    def _replayed(
        self,
        run: Pass,
        rows: Rows,
        cache: KVCache,
        x: Tensor | None,
        ids: Sequence[int] | None = None,
    ) -> tuple[Tensor, list[int]] | None:
        """A pass of residuals x [N, d], or of tokens `ids` → its outputs [N, ...], and the tokens
        that it chooses, if it does. None: it has no static shape, and nothing has been done.
        """
        width = self._width(x, rows, run, cache)
        if width is None:
            return None
        assert isinstance(cache, StaticKVCache)
        storage, span = self.ready(cache, rows)
        inputs = storage.inputs.get((width, span))
        if inputs is None:
            inputs = StaticRows(self.parts, storage, width, span, self.info.hidden_size)
            storage.inputs[width, span] = inputs
        inputs.load(rows, cache, x, ids)
        key = (width, span, run.key)
        if key in storage.captures:
            storage.captures.move_to_end(key)
            _, replay = storage.captures[key]
            return inputs.unload(replay()), inputs.chosen_tokens() if run.chooses else []
        function = LayerRun(self.parts, self.norms, inputs, storage, run)
        got, tokens = None, list[int]()
        try:
            replay = self.capture(function)
            got = inputs.unload(replay())
            tokens = inputs.chosen_tokens() if run.chooses else []
        except RuntimeError as error:
            self.graph_fallback = f"CUDA graph capture failed ({str(error).splitlines()[0]})"

        # After the replay, so that the keys and values in the cache are the reference's, should the
        # capture turn out to be of no use.
        if x is None:
            x = self.embed(torch.as_tensor(ids, device=self.info.device), rows.pos)
        reference = partial(self._reference, run, rows, cache)
        expected = reference(x)
        logits = self.logits(expected) if run.chooses else None
        if got is not None:
            self._compare(got, expected, x, reference)
            if logits is not None:
                self._compare_tokens(tokens, logits)
        if self.graph_fallback is not None:
            storage.captures.clear()
            self._storages.clear()
            return expected, [] if logits is None else argmax_rows(logits)
        storage.captures[key] = (function, replay)
        if len(storage.captures) > MAX_CAPTURES:
            storage.captures.popitem(last=False)
        # once more: the first pass of a shape is to give what the later ones do, to the bit
        return inputs.unload(replay()), inputs.chosen_tokens() if run.chooses else []

    def capture(self, function: Callable[[], Tensor]) -> Replay:
        """Of a function that runs the model's layers. Raises RuntimeError where that is not
        possible.
        """
        with self._frozen():
            return self.recorder.capture(function)

    def ready(self, cache: StaticKVCache, rows: Rows) -> tuple[StaticStorage, int]:
        """`rows` are about to run over `cache` → its storage, and the slots that they attend to,
        rounded up.
        """
        cache.note_positions(rows)
        end = int(rows.visible_end().max())
        if end > cache.capacity:
            raise ValueError(f"rows look at {end} slots; the cache has {cache.capacity}")
        self._note_use(cache.storage)
        return cache.storage, round_up(max(end, 1))

    def _reference(self, run: Pass, rows: Rows, cache: KVCache, x: Tensor) -> Tensor:
        """What a pass gives without captures."""
        inner, begin = [], run.start
        for tap in run.taps:
            x = HFDecoder.layers(self, x, rows, begin, tap, cache)
            begin = tap
            inner.append(x)
        x = HFDecoder.layers(self, x, rows, begin, run.stop, cache, run.adapters)
        return torch.cat([*inner, x], dim=-1) if inner else x

    def _compare(
        self, got: Tensor, expected: Tensor, x: Tensor, reference: Callable[[Tensor], Tensor]
    ) -> None:
        difference = relative_difference(got, expected)
        if difference <= rounding_limit(x.dtype):  # what is no number is not
            return
        other = reference(_rounded(x))
        reference(x)  # whose keys and values stay
        if not difference <= _ROUNDINGS * relative_difference(other, expected):
            self.graph_fallback = (
                "the CUDA graph of a pass gave other numbers than the model's own layers "
                f"(relative difference {difference:.1e})"
            )

    def _compare_tokens(self, tokens: Sequence[int], logits: Tensor) -> None:
        """Whether the tokens that a capture chose are the likeliest, but for rounding."""
        at = torch.tensor(tokens, device=logits.device, dtype=torch.int64)[:, None]
        behind = logits.amax(dim=-1) - logits.gather(1, at)[:, 0]
        if not bool((behind <= _ROUNDINGS * rounding_limit(self.info.dtype) * logits.std()).all()):
            self.graph_fallback = (
                "the CUDA graph of a pass chose other tokens than the model's own head"
            )

    def _width(self, x: Tensor | None, rows: Rows, run: Pass, cache: KVCache) -> int | None:
        """The rows per sequence of the static shape for this call; None: it is not one for a
        capture.
        """
        if self.graph_fallback is not None or not isinstance(cache, StaticKVCache):
            return None
        if not len(rows) or (x is not None and len(rows) != len(x)) or len(rows) > MAX_ROWS:
            return None
        if run.start >= run.stop and not run.chooses:
            return None
        width = width_of(len(rows) if cache.batch == 1 else int(np.bincount(rows.seq).max()))
        return width if width is not None and width * cache.batch <= MAX_ROWS else None

    def _free_storage(self, batch: int, capacity: int) -> StaticStorage | None:
        """The last used one that is free and large enough. Where there is none, old ones are
        dropped: before another one is allocated.
        """
        free = [storage for storage in self._storages if storage.free]
        fits = [s for s in free if s.batch == batch and s.capacity >= capacity]
        if fits:
            return fits[-1]
        dropped = free[: max(0, len(free) - FREE_STORAGES + 1)]
        self._storages = [storage for storage in self._storages if storage not in dropped]
        return None

    def _note_use(self, storage: StaticStorage) -> None:
        """It is the last to be dropped."""
        if not self._storages or self._storages[-1] is not storage:
            others = [one for one in self._storages if one is not storage]
            self._storages = [*others, storage]


def unsupported(parts: ModelParts) -> str | None:
    """Why passes of this model cannot be captured, as far as its structure tells; None when they
    may be.
    """
    if any(moe is not None for moe in parts.moe):
        return "its experts get a varying number of rows, so shapes are not static"
    kinds = getattr(parts.rotary_module, "rope_type", None)
    for kind in kinds.values() if isinstance(kinds, Mapping) else [kinds]:
        if kind in ("dynamic", "longrope"):
            return f"its {kind} rotary embedding depends on the positions of each call"
    devices = {p.device for p in parts.model.parameters()}
    if len(devices) > 1:
        return f"its weights are on several devices ({', '.join(sorted(map(str, devices)))})"
    return None


def _rounded(x: Tensor) -> Tensor:
    """x [N, d] with every other number moved by a rounding error of its type.

    Some inputs double such a difference from layer to layer, above all what is no text.
    """
    moved = x.clone()
    moved[:, ::2] *= 1 + torch.finfo(x.dtype).eps
    return moved
