"""Parts of a step that a decoder can capture and replay: the interface of decoders whose passes are
captured, as CUDA graphs are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from multirate.runtime.draft_branch import Likeliest
from multirate.runtime.kv_cache import KVCache, LayerKV
from multirate.runtime.rows import Rows

if TYPE_CHECKING:
    from multirate.runtime.decoder import LayerAdapter

RowsFunction = Callable[..., Tensor]


@dataclass(frozen=True)
class StaticSlots:
    """Where captured rows stand in a layer of one sequence: `pos` and `slot` (written) int64 [N],
    `seen` bool [N, span], the layer's `keys` and `values` [1, H_kv, > span, D].
    """

    pos: Tensor
    slot: Tensor
    seen: Tensor
    keys: Tensor
    values: Tensor

    def attended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the rows' [1, H_kv, N, D] → what they may look at, [1, H_kv, span, D]."""
        self.keys.index_copy_(2, self.slot, key.to(self.keys.dtype))
        self.values.index_copy_(2, self.slot, value.to(self.values.dtype))
        span = self.seen.shape[-1]
        return self.keys[:, :, :span], self.values[:, :, :span]


class CapturedRows(ABC):
    """Runs functions of N rows, [N, ...] each → [N, ...], which are captured at first use."""

    @abstractmethod
    def new_cache(self, batch: int, capacity: int, layout: list[LayerKV]) -> KVCache:
        """An empty cache for `with_cache`."""

    @abstractmethod
    def alone(
        self,
        name: Hashable,
        function: RowsFunction,
        *inputs: Tensor,
        judged: Callable[[Tensor], Tensor] = lambda out: out,
    ) -> Tensor:
        """function(*inputs) of rows that do not look at one another. judged: the part of the
        outputs whose numbers are compared.
        """

    @abstractmethod
    def with_cache(
        self, name: Hashable, function: RowsFunction, rows: Rows, cache: KVCache, *inputs: Tensor
    ) -> Tensor:
        """function(*inputs, at, cache) of `rows` that write to the one layer of `cache` and look at
        it: `at` are the rows, or StaticSlots that stand for both.
        """

    @abstractmethod
    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """`Decoder.embed` inside a captured function, int64 [N] each."""


class CapturedLevels(ABC):
    """Runs whole draft levels, each captured at first use."""

    @abstractmethod
    def run(
        self,
        runner: LevelRunner,
        ids: list[int],
        rows: Rows,
        carried: Tensor | None,
        fresh: int,
        count: int,
        sharpness: float,
    ) -> tuple[Tensor, Tensor, Likeliest | None] | None:
        """As `DraftRunner.level`; None: it has no static shape, and nothing has been done."""


class Level(Protocol):
    """N rows, of which the last are new to the model."""

    def slow(self, x: Tensor) -> Tensor:
        """Residuals [N, d] that enter the model → those after its first layers, [N, d]."""
        ...

    def both(self, slow: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """The same beside the branch's rows [N, d], which go through the same layers with its
        adapters → the slow residuals of the new rows at least, as the last ones, and the branch's.
        """
        ...

    def own(self, function: RowsFunction, *inputs: Tensor | None) -> Tensor:
        """function(*inputs, rows, K/V of the branch's own layer), [N, d]."""
        ...


class LevelRunner(Protocol):
    """What runs levels: a DraftRunner, whose members these are."""

    first_layers: int
    streams: int
    adapters: Mapping[int, LayerAdapter] | None

    @property
    def caches(self) -> tuple[KVCache | None, KVCache | None]: ...

    def step(
        self, ids: list[int], rows: Rows, carried: Tensor | None, fresh: int
    ) -> tuple[Tensor, Tensor]: ...

    def level_of(
        self, embedded: Tensor, carried: Tensor | None, level: Level
    ) -> tuple[Tensor, Tensor]: ...

    def logits(self, p: Tensor) -> Tensor: ...

    def top(self, p: Tensor, count: int, sharpness: float = 1.0) -> Likeliest: ...


def top_of(logits: Tensor, count: int, sharpness: float) -> tuple[Tensor, Tensor]:
    """logits [n, V] → the probabilities under softmax(sharpness · logits) of the `count` likeliest
    tokens, and their ids, [n, count] each.
    """
    logits = sharpness * logits
    best, ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
    return torch.exp(best - logits.logsumexp(-1, keepdim=True)), ids


def top_rows(logits: Callable[[Tensor], Tensor], count: int, sharpness: float, x: Tensor) -> Tensor:
    """Of rows x [n, d]: their likeliest tokens' ids, which float64 holds exactly, and these tokens'
    probabilities, side by side [n, 2 · count].
    """
    best, ids = top_of(logits(x), count, sharpness)
    return torch.cat([ids.double(), best.double()], dim=-1)


def likeliest_of(found: Tensor) -> Likeliest:
    """What `top_rows` found, in one copy from the device."""
    ids, probabilities = found.cpu().chunk(2, dim=-1)
    return ids.long().tolist(), probabilities.tolist()
