"""A pass of model layers over rows of static shape: what is captured."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from multirate.runtime.cuda.fused_norms import FusedNorms
from multirate.runtime.cuda.static_cache import StaticStorage, seen_slots
from multirate.runtime.decoder import LayerAdapter
from multirate.runtime.hf.adapter_hooks import apply_adapter
from multirate.runtime.hf.parts import ModelParts, additive
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import Rows
from multirate.runtime.transfer import copy_to, to_device

NUMBERS = 6
"""Of a row, in StaticRows."""


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
