"""Runs one level of a trained draft branch for the drafter (stream_drafter.py), whatever the branch
is.

`NativeDraftRunner` is what all branches on the kernel share: the same level in one call, and what
fused rounds need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multirate.methods._shared.captured_levels import CapturedLevels
from multirate.methods._shared.captured_runner import CapturedRunner, Likeliest, top_of
from multirate.methods._shared.draft_head import DraftHead
from multirate.methods._shared.draft_level import Level, RowsLevel
from multirate.methods._shared.layers import OwnAttention
from multirate.runtime.cuda.captured_rows import RowsFunction
from multirate.runtime.cuda.decoder import GraphedDecoder
from multirate.runtime.decoder import Decoder, LayerAdapter
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.native import NativeDecoder, abi, library
from multirate.runtime.native.cache import NativeKVCache
from multirate.runtime.native.own_layer import OwnLayer
from multirate.runtime.noise import Noise, with_noise
from multirate.runtime.rows import Rows


class DraftRunner(CapturedRunner, ABC):
    """Runs the draft branch `stream` beside `decoder`. Owns the keys and values of its extra layer.

    keys_only: `step` leaves only the keys and values of target rows, which therefore run through
        the first layers again when they are verified.
    taps: layers whose entering residuals `carried` reads.
    first_layers: how many of the model's layers a level runs.
    streams: 2 if target rows and adapter rows (with `adapters`) run through these, otherwise 1.
    """

    decoder: Decoder
    stream: Any
    keys_only: bool = False
    taps: tuple[int, ...] = ()
    first_layers: int = 0
    streams: int = 1
    adapters: Mapping[int, LayerAdapter] | None = None

    _slow_cache: KVCache | None = None
    _own: KVCache | None = None
    _levels: CapturedLevels | None = None

    def _capture_on(self, decoder: Decoder) -> None:
        super()._capture_on(decoder)
        if isinstance(decoder, GraphedDecoder):
            self._levels = CapturedLevels(decoder)

    def _begin(self, cache: KVCache, attention: OwnAttention | None) -> None:
        """`begin` with the own layer's `attention`, if there is one: its K/V are empty."""
        self._slow_cache = cache
        self._own = None  # its memory may be the next one's
        if attention is not None:
            self._own = attention.new_cache(cache.batch, cache.capacity, self._captured)

    def _own_rows(self, function: RowsFunction, rows: Rows, *inputs: Tensor | None) -> Tensor:
        """function(*inputs, rows, K/V of the own layer), the part of a step that looks at these."""
        given = [x for x in inputs if x is not None]
        if len(given) < len(inputs):
            return function(*inputs, rows, self._own)
        return self._over(function, rows, self._own, *given)

    @property
    def window(self) -> int | None:
        """How many of the newest tokens the own layer sees; None: all."""
        return None

    @property
    def caches(self) -> tuple[KVCache | None, KVCache | None]:
        """What a level looks at: of the model, where its layers run, and of the own layer."""
        return (self._cache if self.first_layers else None), self._own

    @abstractmethod
    def begin(self, cache: KVCache) -> None:
        """A new generation over the slow residual's `cache`."""

    def serves(self, cache: KVCache) -> bool:
        """Whether the own layer's K/V are those of `cache`: no other generation, and no trial step,
        has begun since.
        """
        return cache is self._slow_cache

    @property
    def _cache(self) -> KVCache:
        assert self._slow_cache is not None, "begin was not called"
        return self._slow_cache

    @torch.no_grad()
    def carried(self, hidden: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        """What is carried of tokens: their h_L [n, d], or, where the stream reads `taps`, what it
        makes of both.
        """
        if not self.taps:
            return hidden
        dtype = self.decoder.info.dtype
        inner = {layer: states.to(dtype) for layer, states in taps.items()}
        found: Tensor = self.stream.carried(hidden.to(dtype), inner)
        return found.to(hidden.dtype)

    @torch.no_grad()
    def step(
        self, ids: list[int], rows: Rows, carried: Tensor | None, fresh: int
    ) -> tuple[Tensor, Tensor]:
        """The stream's rows of tokens ids [N] at `rows` (slots as the slow residual's), carried
        residuals [N, d].

        The last `fresh` rows are new to the slow residual as well: it runs beside them and writes
        its K/V. Rows before them refresh the own layer's K/V of tokens that are committed already.
        → (slow residuals of the fresh rows where verification begins [fresh, d], unless keys_only;
        the stream's outputs p [N, d], of which those of rows before the fresh ones are of no use:
        what comes after their keys and values need not have run)
        """
        decoder = self.decoder
        h0 = decoder.embed(
            torch.tensor(ids, device=decoder.info.device, dtype=torch.int64), rows.pos
        )
        level = RowsLevel(
            decoder, self._cache, self.first_layers, self.adapters, rows, fresh, self._own_rows
        )
        hidden, p = self.level_of(h0, carried, level)
        return hidden[len(hidden) - fresh :], p

    def level(
        self,
        ids: list[int],
        rows: Rows,
        carried: Tensor | None,
        fresh: int,
        count: int = 0,
        sharpness: float = 1.0,
    ) -> tuple[Tensor, Tensor, Likeliest | None]:
        """`step`, of whose outputs those of the fresh rows alone [fresh, d], and these rows'
        `top` without noise where that is known at once; None: it is yet to be asked for.
        """
        if self._levels is not None:
            found = self._levels.run(self, ids, rows, carried, fresh, count, sharpness)
            if found is not None:
                return found
        hidden, p = self.step(ids, rows, carried, fresh)
        return hidden, p[len(p) - fresh :], None

    @abstractmethod
    def level_of(
        self, embedded: Tensor, carried: Tensor | None, level: Level
    ) -> tuple[Tensor, Tensor]:
        """What the stream computes of the rows of a `level`: their embeddings and what is carried,
        [N, d] each → slow residuals and outputs, as `step`. It may read no number of a tensor.
        """

    def slow(self, ids: list[int], rows: Rows) -> Tensor:
        """The slow residual alone up to where verification begins → [N, d]; not where keys_only."""
        return self.decoder.first_layers(ids, rows, self.first_layers, self._cache)

    @abstractmethod
    def logits(self, p: Tensor) -> Tensor:
        """float32 [n, V]; tokens outside a reduced draft vocabulary get −inf."""

    def agreement(self, p: Tensor) -> list[float]:
        """The trained estimate, for each row of p [n, d], that its argmax is the full model's."""
        raise NotImplementedError

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
        if noise is None and self._captured is not None:
            return self._top_captured(self._captured, self.logits, p, count, sharpness)
        logits = self.logits(p)
        if noise is not None:
            logits = with_noise(logits, noise)
        best, ids = top_of(logits, count, sharpness)
        return ids.tolist(), best.tolist()


class NativeDraftRunner(DraftRunner):
    """A stream that the kernel runs, from packed copies of its weights. Residuals are fp32.

    packed: the stream; head: what its outputs are read with; own_layer: its own, None without.
    Subclasses set them before the first step.
    """

    decoder: NativeDecoder
    packed: abi.CData
    head: DraftHead
    own_layer: OwnLayer | None = None

    @property
    def window(self) -> int | None:
        return None if self.own_layer is None else self.own_layer.window

    def see(self, window: int | None) -> None:
        """From now on the own layer, if there is one, sees so many of the newest tokens; None:
        all.
        """
        if self.own_layer is not None:
            self.own_layer.window = window

    @property
    def arla(self) -> abi.CData | None:
        """What `agreement` computes, as the kernel does."""
        return None

    def begin(self, cache: KVCache) -> None:
        assert isinstance(cache, NativeKVCache)
        self._slow_cache = self.native_cache = cache
        self.own_cache = self.own_cache_for(cache)

    def own_cache_for(self, cache: NativeKVCache) -> NativeKVCache | None:
        """An empty cache for the own layer, as large as ``cache``; None without one."""
        own = self.own_layer
        return None if own is None else own.new_cache(cache.batch, cache.capacity)

    def step(
        self, ids: list[int], rows: Rows, carried: Tensor | None, fresh: int
    ) -> tuple[Tensor, Tensor]:
        n, cache, own = len(ids), self.native_cache, self.own_cache
        for store in (cache, own):
            if store is not None:
                store.make_room(rows)
        tokens = np.array(ids, dtype=np.int64)
        x = abi.floats_for(n + fresh, self.decoder.info.hidden_size)
        carried = None if carried is None else carried.float().contiguous()
        library.kernel().mr_stream_step(
            self.decoder.workspace.address,
            self.packed,
            cache.address,
            abi.NULL if own is None else own.address,
            0 if own is None else own.capacity,
            abi.rows_of(rows, cache.capacity),
            fresh,
            abi.longs(tokens),
            abi.tensor(carried),
            abi.tensor(x),
        )
        return x[:fresh], x[fresh:]

    def top(
        self,
        p: Tensor,
        count: int,
        sharpness: float = 1.0,
        noise: Sequence[Noise] | None = None,
    ) -> tuple[list[list[int]], list[list[float]]]:
        return self.head.top(self.decoder, p, count, sharpness, noise)
