"""Decoding passes with static shapes, captured once and replayed: CUDA graphs for any model that
HFDecoder runs.

Its logic is tested on CPU with recorders that replay the same static-shape code.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from multirate.runtime.cuda.fused_norms import FusedNorms
from multirate.runtime.cuda.static_cache import StaticKVCache, StaticStorage, round_up, seen_slots
from multirate.runtime.decoder import LayerAdapter, argmax_rows
from multirate.runtime.hf.adapter_hooks import apply_adapter
from multirate.runtime.hf.decoder import HFDecoder, relative_difference, rounding_limit
from multirate.runtime.hf.parts import ModelParts, additive
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.noise import Noise
from multirate.runtime.rows import Rows
from multirate.runtime.transfer import copy_to, to_device

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of one sequence are padded to one of these; a call with more (a long prompt) runs as
HFDecoder does.
"""
MAX_ROWS = 256
"""Padded rows of all sequences together, above which a pass is bound by arithmetic and not by
launching kernels.
"""
MAX_CAPTURES = 64
"""Captures kept for one cache; the least recently used goes first."""
FREE_STORAGES = 2
"""Storages that no cache uses, kept with their captures for caches to come; the least recently
used goes first.
"""
NUMBERS = 6
"""Of a row, in StaticRows."""
_WARM_UPS = 3
_ROUNDINGS = 16.0
"""How much more than another rounding of its inputs a captured pass may change the result, as it
rounds otherwise in every layer.
"""

Replay = Callable[[], Tensor]


def width_of(rows: int) -> int | None:
    """What so many rows of a sequence are padded to; None: they are too many."""
    return next((width for width in WIDTHS if width >= rows), None)


class Recorder(Protocol):
    """Turns a function without arguments, reading and writing fixed tensors, into one
    that repeats its device work.
    """

    def capture(self, function: Callable[[], Tensor]) -> Replay:
        """The returned function's tensor is valid until anything is captured or replayed again."""
        ...


class EagerRecorder:
    """Runs the function itself each time: the static-shape code without graphs, for devices that
    have none.
    """

    def capture(self, function: Callable[[], Tensor]) -> Replay:
        return function


class CudaRecorder:
    """One torch.cuda.CUDAGraph per function; all share a memory pool, for only one of them runs at
    a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()
        self._pool: Any = None

    def capture(self, function: Callable[[], Tensor]) -> Replay:
        if not self._graphs:  # a pool whose last graph is gone cannot be captured into any more
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self.device):
            # Libraries allocate workspaces and pick kernels at first use, which a capture may not
            # contain.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    function()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads of the user's program may go on using the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = function()
        self._graphs.add(graph)

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


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
        if recorder is None:
            on_cuda = self.info.device.type == "cuda"
            recorder = CudaRecorder(self.info.device) if on_cuda else EagerRecorder()
        self.recorder = recorder
        self._storages: list[StaticStorage] = []  # the last used one last

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        if self.graph_fallback is not None:
            return super().new_cache(batch, capacity)
        kept = self._free_storage(batch, capacity)
        cache = StaticKVCache(batch, capacity, self._kv_layout, kept)
        self._note_use(cache.storage)
        return cache

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


@dataclass(frozen=True)
class Pass:
    """What is captured: layers [start, stop), with adapters on accelerated rows.

    taps: layers whose entering residuals stand before the last ones, [N, (taps + 1) · d].
    embeds: whether it begins with tokens, not with residuals. chooses: whether it ends with the
    argmax of each row's logits.
    """

    start: int
    stop: int
    adapters: Mapping[int, LayerAdapter] = field(default_factory=dict)
    taps: tuple[int, ...] = ()
    embeds: bool = False
    chooses: bool = False

    @property
    def key(self) -> Hashable:
        adapters = tuple((i, id(adapter)) for i, adapter in self.adapters.items())
        return self.start, self.stop, adapters, self.taps, self.embeds, self.chooses


class StaticRows:
    """What changes from one replay to the next, in tensors that stay: B sequences of `width` rows
    seeing `span` slots.

    `x` [B, width, d]; `numbers` [6, B, width] int64 (position, slot written, prefix, tree,
    accelerated, token): all of a call's rows cross to the device in one copy; `positions` [B, span]
    int64 of the slots, for sliding windows. Padding rows see nothing and write to the scratch slot,
    which lies behind every span. `chosen` [B, width] int64: the tokens that a replay chose.
    """

    def __init__(
        self, parts: ModelParts, storage: StaticStorage, width: int, span: int, size: int
    ) -> None:
        self.shape, self.span, self.scratch = (storage.batch, width), span, storage.scratch
        self.windowed = any(window is not None for window in parts.windows)
        self.x = torch.zeros(*self.shape, size, dtype=parts.dtype, device=parts.device)
        self.numbers = torch.zeros(NUMBERS, *self.shape, dtype=torch.int64, device=parts.device)
        self.position_ids, self.slot, self.prefix, self.tree, self.accelerated, self.ids = (
            self.numbers.unbind()
        )
        self.chosen = torch.zeros(self.shape, dtype=torch.int64, device=parts.device)
        self.positions = torch.zeros(storage.batch, span, dtype=torch.int64, device=parts.device)
        self._rows: Rows | None = None
        self._cache: Callable[[], KVCache | None] = lambda: None
        self._version = -1
        self._count = 0
        self._at: Tensor | None = None

    def load(
        self, rows: Rows, cache: KVCache, x: Tensor | None, ids: Sequence[int] | None = None
    ) -> None:
        """Copies the rows' numbers (these only when they changed: layers are often run in pieces)
        and residuals x [N, d], or tokens.
        """
        known = self._rows is rows and self._cache() is cache and self._version == cache.version
        if ids is not None or not known:
            self._load_rows(rows, cache, ids)
        if x is None:
            return
        flat = self.x.view(-1, self.x.shape[-1])
        if self._at is not None:
            flat.zero_()
            flat.index_copy_(0, self._at, x)
            return
        flat[: self._count] = x
        if self._count < len(flat):
            flat[self._count :] = 0

    def unload(self, hidden: Tensor) -> Tensor:
        """[B, width, d] → the N rows [N, d], in memory of their own."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        return flat[: self._count].clone() if self._at is None else flat.index_select(0, self._at)

    def chosen_tokens(self) -> list[int]:
        """Of the N rows."""
        flat = self.chosen.view(-1)
        mine = flat[: self._count] if self._at is None else flat.index_select(0, self._at)
        tokens: list[int] = mine.tolist()
        return tokens

    def mask(self, window: int | None) -> Tensor:
        """The additive mask [B, 1, width, span], computed on the device from the tensors above
        alone.
        """
        seen = seen_slots(self.prefix, self.tree, self.span)
        if window is not None:
            seen = seen & (self.positions[:, None, :] > self.position_ids[:, :, None] - window)
        return additive(seen[:, None], self.x.dtype)

    def _load_rows(self, rows: Rows, cache: KVCache, ids: Sequence[int] | None) -> None:
        n, (batch, width) = len(rows), self.shape
        b, t = np.zeros(n, np.int64), np.arange(n)
        self._count, self._at = n, None
        if batch > 1:
            b = rows.seq.astype(np.int64)
            counts = np.bincount(b, minlength=batch)
            t[np.argsort(b, kind="stable")] = np.arange(n) - np.repeat(
                np.cumsum(counts) - counts, counts
            )
            at = b * width + t
            if not np.array_equal(at, np.arange(n)):
                self._at = to_device(at, self.x.device)
        grid = np.zeros((NUMBERS, batch, width), np.int64)
        grid[1] = self.scratch
        slot = np.where(rows.slot < 0, self.scratch, rows.slot)
        accelerated = 0 if rows.accelerated is None else rows.accelerated
        tokens = 0 if ids is None else np.asarray(ids)
        for row, values in zip(
            grid, (rows.pos, slot, rows.prefix, rows.tree, accelerated, tokens), strict=True
        ):
            row[b, t] = values
        copy_to(self.numbers, grid)
        self.load_positions(cache)
        self._rows, self._cache, self._version = rows, weakref.ref(cache), cache.version

    def load_positions(self, cache: KVCache) -> None:
        """Of the slots, where a layer has a window."""
        if self.windowed:
            copy_to(self.positions, cache.positions[:, : self.span].astype(np.int64))


class LayerRun:
    """A pass on a StaticRows: what is captured. Calling it reads no number that is not in a
    tensor.
    """

    def __init__(
        self,
        parts: ModelParts,
        norms: FusedNorms,
        inputs: StaticRows,
        storage: StaticStorage,
        run: Pass,
    ) -> None:
        # The pass has the original adapters: captures are known by their ids, which stay taken.
        self.parts, self.norms, self.inputs, self.run = parts, norms, inputs, run
        # Not the storage itself: it holds this object, and a circle would hold its memory.
        self.keys, self.values = storage.keys, storage.values
        self.adapters = {
            i: _RowsOnly(adapter, inputs.accelerated) for i, adapter in run.adapters.items()
        }

    def __call__(self) -> Tensor:
        parts, inputs, run = self.parts, self.inputs, self.run
        hidden = parts.embed(inputs.ids, inputs.position_ids) if run.embeds else inputs.x
        masks = {w: inputs.mask(w) for w in set(parts.windows[run.start : run.stop])}
        rotary = parts.position_embeddings(hidden, inputs.position_ids)
        inner = {}
        with self.norms.active():
            for i in range(run.start, run.stop):
                inner[i] = hidden
                layer, adapter = parts.layers[i], self.adapters.get(i)
                with nullcontext() if adapter is None else apply_adapter(layer, adapter):
                    hidden = parts.run_layer(
                        i, hidden, masks[layer.window], inputs.position_ids, rotary, self
                    )
            inner[run.stop] = hidden
            if run.chooses:
                inputs.chosen.copy_(parts.logits(hidden).float().argmax(dim=-1))
        if run.taps:
            return torch.cat([*(inner[tap] for tap in run.taps), hidden], dim=-1)
        return hidden

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """The cache protocol of transformers' attention: writes [B, H, width, D], returns views [B,
        H, span, D].
        """
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        slot = self.inputs.slot[:, None, :, None]
        keys.scatter_(2, slot.expand_as(key), key)
        values.scatter_(2, slot.expand_as(value), value)
        return keys[:, :, : self.inputs.span], values[:, :, : self.inputs.span]


class _RowsOnly:
    """An adapter whose deltas are zero outside the rows flagged in a tensor: no index list, whose
    length would vary.
    """

    def __init__(self, adapter: LayerAdapter, flags: Tensor) -> None:
        self._deltas = {
            name: _MaskedDelta(delta, flags) for name, delta in adapter.deltas().items()
        }

    def deltas(self) -> Mapping[str, nn.Module]:
        return self._deltas


class _MaskedDelta(nn.Module):
    def __init__(self, delta: nn.Module, flags: Tensor) -> None:
        super().__init__()
        self.delta, self.flags = delta, flags

    def forward(self, x: Tensor) -> Tensor:
        extra: Tensor = self.delta(x)
        return torch.where(self.flags.view(*x.shape[:-1], 1) != 0, extra, torch.zeros_like(extra))


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
