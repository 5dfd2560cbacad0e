"""Runs one level of a trained draft branch for the drafter (branch_drafter.py), whatever the branch
is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multirate.methods._shared.captured_runner import CapturedRunner
from multirate.methods._shared.layers import OwnAttention
from multirate.runtime.captured import CapturedLevels, Level, RowsFunction, top_of
from multirate.runtime.decoder import Decoder, LayerAdapter
from multirate.runtime.draft_branch import DraftBranch, DraftWeights, Likeliest, PackedBranch
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.noise import Noise, with_noise
from multirate.runtime.rows import Rows


class RowsLevel:
    """`rows` of which the last `fresh` are new. first: how many layers of `decoder` run, over
    `cache`; own_rows: as `Level.own`, with the rows before the inputs.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        first: int,
        adapters: Mapping[int, LayerAdapter] | None,
        rows: Rows,
        fresh: int,
        own_rows: Callable[..., Tensor],
    ) -> None:
        self._decoder, self._cache, self._first, self._adapters = decoder, cache, first, adapters
        self._rows, self._fresh, self._own_rows = rows, fresh, own_rows

    def slow(self, x: Tensor) -> Tensor:
        slot = self._rows.slot.copy()
        slot[: len(slot) - self._fresh] = -1  # their K/V are written already
        return self._decoder.layers(x, replace(self._rows, slot=slot), 0, self._first, self._cache)

    def both(self, slow: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        rows, n, fresh = self._rows, len(self._rows), self._fresh
        reading = replace(rows, slot=np.full(n, -1, np.int32), accelerated=np.ones(n, np.bool_))
        if fresh:
            new = slice(n - fresh, n)
            fresh_rows = Rows(
                rows.seq[new], rows.slot[new], rows.pos[new], rows.prefix[new], rows.tree[new]
            )
            reading = Rows.concat([fresh_rows, reading])
            branch = torch.cat([slow[new], branch])
        x = self._decoder.layers(branch, reading, 0, self._first, self._cache, self._adapters)
        return x[:fresh], x[fresh:]

    def own(self, function: RowsFunction, *inputs: Tensor | None) -> Tensor:
        return self._own_rows(function, self._rows, *inputs)


class DraftRunner(CapturedRunner, ABC):
    """Runs the draft branch `module` beside `decoder`. Owns the keys and values of its extra layer.

    keys_only: `step` leaves only the keys and values of target rows, which therefore run through
        the first layers again when they are verified.
    taps: layers whose entering residuals `carried` reads.
    first_layers: how many of the model's layers a level runs.
    streams: 2 if target rows and adapter rows (with `adapters`) run through these, otherwise 1.
    """

    decoder: Decoder
    module: Any
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
        self._levels = decoder.captured_levels()

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

    packed: PackedBranch | None = None
    """What runs the levels, if torch does not."""

    @property
    def window(self) -> int | None:
        """How many of the newest tokens the own layer sees; None: all."""
        return None

    def see(self, window: int | None) -> None:
        """From now on the own layer, if there is one, sees so many of the newest tokens; None:
        all.
        """

    @property
    def caches(self) -> tuple[KVCache | None, KVCache | None]:
        """What a level looks at: of the model, where its layers run, and of the own layer."""
        return (self._cache if self.first_layers else None), self._own

    @property
    def own_cache(self) -> KVCache | None:
        """The own layer's K/V in this generation; None: it has none."""
        return self._own

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
        """What is carried of tokens: their h_L [n, d], or, where the branch reads `taps`, what it
        makes of both.
        """
        if not self.taps:
            return hidden
        dtype = self.decoder.info.dtype
        inner = {layer: states.to(dtype) for layer, states in taps.items()}
        found: Tensor = self.module.carried(hidden.to(dtype), inner)
        return found.to(hidden.dtype)

    @torch.no_grad()
    def step(
        self, ids: list[int], rows: Rows, carried: Tensor | None, fresh: int
    ) -> tuple[Tensor, Tensor]:
        """The branch's rows of tokens ids [N] at `rows` (slots as the slow residual's), carried
        residuals [N, d].

        The last `fresh` rows are new to the slow residual as well: it runs beside them and writes
        its K/V. Rows before them backfill the own layer's K/V of tokens that are committed already.
        → (slow residuals of the fresh rows where verification begins [fresh, d], unless keys_only;
        the branch's outputs p [N, d], of which those of rows before the fresh ones are of no use:
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
        """What the branch computes of the rows of a `level`: their embeddings and what is carried,
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


class PackedRunner(DraftRunner):
    """`runner`, whose levels the decoder's own form of the branch runs. Residuals are fp32."""

    packed: PackedBranch

    def __init__(self, runner: DraftRunner, packed: PackedBranch) -> None:
        self._runner, self.packed = runner, packed
        self.decoder, self.module, self.taps = runner.decoder, runner.module, runner.taps
        self.first_layers, self.keys_only = runner.first_layers, packed.keys_only

    @property
    def window(self) -> int | None:
        return self.packed.window

    def see(self, window: int | None) -> None:
        self.packed.window = window

    @property
    def own_cache(self) -> KVCache | None:
        return self.packed.own_cache

    def begin(self, cache: KVCache) -> None:
        self._slow_cache = cache
        self.packed.begin(cache)

    def carried(self, hidden: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        return self.packed.carried(hidden, taps)

    def step(
        self, ids: list[int], rows: Rows, carried: Tensor | None, fresh: int
    ) -> tuple[Tensor, Tensor]:
        return self.packed.step(ids, rows, carried, fresh)

    def level_of(
        self, embedded: Tensor, carried: Tensor | None, level: Level
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("the decoder runs whole levels")

    def logits(self, p: Tensor) -> Tensor:
        return self._runner.logits(p)

    def agreement(self, p: Tensor) -> list[float]:
        return self.packed.agreement(p)

    def top(
        self,
        p: Tensor,
        count: int,
        sharpness: float = 1.0,
        noise: Sequence[Noise] | None = None,
    ) -> Likeliest:
        return self.packed.top(p, count, sharpness, noise)


def packed_where_possible(
    runner: DraftRunner, branch: Callable[[], DraftBranch], weights: DraftWeights
) -> DraftRunner:
    """`runner` on the decoder's own form of `branch` if there is one, packed as `weights` says."""
    drafting = runner.decoder.drafting(weights)
    packed = None if drafting is None else drafting.branch(branch())
    return runner if packed is None else PackedRunner(runner, packed)
