"""A level of drafts: the rows of one drafting step, and where their parts run.

What a stream computes of a level (`DraftRunner.level_of`) asks a `Level` for the two parts that
look at keys and values: `RowsLevel` runs them one after another, `StaticLevel`
(captured_levels.py) inside of one capture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from multirate.runtime.captured import RowsFunction
from multirate.runtime.decoder import Decoder, LayerAdapter
from multirate.runtime.kv_cache import KVCache
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

    def both(self, slow: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        rows, n, fresh = self._rows, len(self._rows), self._fresh
        reading = replace(rows, slot=np.full(n, -1, np.int32), accelerated=np.ones(n, np.bool_))
        if fresh:
            new = slice(n - fresh, n)
            fresh_rows = Rows(
                rows.seq[new], rows.slot[new], rows.pos[new], rows.prefix[new], rows.tree[new]
            )
            reading = Rows.concat([fresh_rows, reading])
            stream = torch.cat([slow[new], stream])
        x = self._decoder.layers(stream, reading, 0, self._first, self._cache, self._adapters)
        return x[:fresh], x[fresh:]

    def own(self, function: RowsFunction, *inputs: Tensor | None) -> Tensor:
        return self._own_rows(function, self._rows, *inputs)
