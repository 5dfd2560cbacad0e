"""Whole levels of drafts as captures, on a decoder whose passes are captured: one sequence's
tokens and rows go to the device in one copy, the likeliest next tokens come back in another, and
all between them is one replay (runtime/cuda/decoder.py). In pieces a level takes as long as a step
of plain decoding: what counts is how often the device is asked for something, not what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from multirate.errors import say_once
from multirate.runtime.captured import (
    CapturedLevels,
    LevelRunner,
    RowsFunction,
    StaticSlots,
    likeliest_of,
    top_rows,
)
from multirate.runtime.cuda.passes import NUMBERS, LayerRun, Pass, StaticRows
from multirate.runtime.cuda.recorder import MAX_CAPTURES, WIDTHS, width_of
from multirate.runtime.cuda.static_cache import StaticKVCache, StaticStorage, round_up, seen_slots
from multirate.runtime.draft_branch import Likeliest
from multirate.runtime.hf.decoder import relative_difference, rounding_limit
from multirate.runtime.rows import Rows
from multirate.runtime.transfer import copy_to

if TYPE_CHECKING:
    from multirate.runtime.cuda.decoder import GraphedDecoder


class GraphedLevels(CapturedLevels):
    """Levels of `runner`. The first run of a capture is compared with the level in pieces; where
    it cannot be captured, or gives other numbers, they run in pieces from then on, and `fallback`
    says why.
    """

    def __init__(self, decoder: GraphedDecoder) -> None:
        self._decoder = decoder
        # in the captures' keys: storages outlive runners, whose ids may be others' later
        self._identity = object()
        self.fallback: str | None = None

    @torch.no_grad()
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
        width = width_of(len(ids))
        if (
            self.fallback is not None
            or self._decoder.graph_fallback is not None
            or width is None
            or width * runner.streams > WIDTHS[-1]
        ):
            return None
        slow, own = runner.caches
        if slow is not None and not isinstance(slow, StaticKVCache):
            return None
        if own is not None and not isinstance(own, StaticKVCache):
            return None
        kept = own if slow is None else slow
        if kept is None or kept.batch > 1:
            return None
        end = int(rows.visible_end().max())
        if slow is not None:
            self._decoder.ready(slow, rows)
        if own is not None:
            own.note_positions(rows)
            if end > own.capacity:
                return None
        span, count = round_up(max(end, 1)), min(count, self._decoder.info.vocab_size)
        captures = kept.storage.captures
        where = None if own is None else own.storage
        key = (self._identity, width, span, count, sharpness, id(where), carried is None)
        if key in captures:
            captures.move_to_end(key)
            level, replay = captures[key]
            level.load(ids, rows, carried, fresh, slow)
            return level.unload(replay(), len(ids), fresh)
        level = StaticLevel(
            self._decoder,
            runner,
            None if slow is None else slow.storage,
            where,
            width,
            span,
            count,
            sharpness,
        )
        if carried is not None:
            level.carried = carried.new_zeros(width, carried.shape[-1])
        level.load(ids, rows, carried, fresh, slow)
        try:
            replay = self._decoder.capture(level.function(runner))
            got = level.unload(replay(), len(ids), fresh)
        except RuntimeError as error:
            self._fall_back(f"CUDA graph capture failed ({str(error).splitlines()[0]})")
            return None
        # after the replay, so that the keys and values in the caches are the pieces'
        hidden, p = runner.step(ids, rows, carried, fresh)
        p = p[len(p) - fresh :]
        best = runner.top(p, count, sharpness) if count else None
        limit = rounding_limit(self._decoder.info.dtype)
        difference = max(relative_difference(got[0], hidden), relative_difference(got[1], p))
        if not difference <= limit:
            self._fall_back(
                f"the CUDA graph gave other numbers (relative difference {difference:.1e})"
            )
        elif best is not None and not _near(got[2], best, limit):
            self._fall_back("the CUDA graph gave other probabilities")
        else:
            captures[key] = (level, replay)
            if len(captures) > MAX_CAPTURES:
                captures.popitem(last=False)
        return hidden, p, best

    def _fall_back(self, why: str) -> None:
        self.fallback = why
        say_once(f"running a draft's levels without one CUDA graph for all: {why}")


class StaticLevel:
    """A level of up to `width` rows over the storages of the model's first layers and of the
    branch's own layer: what changes from one replay to the next, and what is captured.

    Where branch and model both run their rows, the branch's come after all of the model's. numbers:
    int64 [NUMBERS + 1, streams · width], a row's as in StaticRows, and where the own layer writes.
    """

    def __init__(
        self,
        decoder: GraphedDecoder,
        runner: LevelRunner,
        slow: StaticStorage | None,
        own: StaticStorage | None,
        width: int,
        span: int,
        count: int,
        sharpness: float,
    ) -> None:
        parts, total = decoder.parts, width * runner.streams
        self._parts, self._own, self._width, self._span = parts, own, width, span
        self._count, self._sharpness = count, sharpness
        self._scratch = tuple(0 if s is None else s.scratch for s in (slow, own))
        self._numbers = torch.zeros(NUMBERS + 1, total, dtype=torch.int64, device=parts.device)
        self.carried: Tensor | None = None
        self._found = torch.zeros(width, 2 * count, dtype=torch.float64, device=parts.device)
        self._rows: StaticRows | None = None
        self._run: LayerRun | None = None
        if slow is not None:
            self._rows = StaticRows(parts, slow, total, span, decoder.info.hidden_size)
            run = Pass(0, runner.first_layers, runner.adapters or {})
            self._run = LayerRun(parts, decoder.norms, self._rows, slow, run)

    def load(
        self,
        ids: list[int],
        rows: Rows,
        carried: Tensor | None,
        fresh: int,
        slow: StaticKVCache | None,
    ) -> None:
        """What `DraftRunner.step` is given. slow: the cache over the model's storage."""
        n, width = len(ids), self._width
        numbers = np.zeros((NUMBERS + 1, self._numbers.shape[1]), np.int64)
        # rows behind the last write to the scratch slot, and see slot 0
        numbers[1], numbers[2], numbers[-1] = self._scratch[0], 1, self._scratch[1]
        for first in range(0, numbers.shape[1], width):
            here = numbers[:, first : first + n]
            here[0], here[2], here[3], here[5] = rows.pos, rows.prefix, rows.tree, ids
            here[4] = first > 0
        # of rows that are not new the model's K/V are written already; the branch's write none
        numbers[1, n - fresh : n] = rows.slot[n - fresh :]
        numbers[-1, :n] = np.where(rows.slot < 0, self._scratch[1], rows.slot)
        copy_to(self._numbers, numbers)
        if self._rows is not None and slow is not None:
            self._rows.load_positions(slow)
        if self.carried is not None and carried is not None:
            self.carried[:n] = carried

    def unload(
        self, outputs: Tensor, rows: int, fresh: int
    ) -> tuple[Tensor, Tensor, Likeliest | None]:
        hidden, p = outputs[rows - fresh : rows].clone().chunk(2, dim=-1)
        if not self._count:
            return hidden, p, None
        return hidden, p, likeliest_of(self._found[rows - fresh : rows])

    def function(self, runner: LevelRunner) -> Callable[[], Tensor]:
        """What is captured: → slow residuals and outputs side by side, [width, 2 · d]. It holds the
        runner; a capture need not.
        """

        def level() -> Tensor:
            width = self._width
            embedded = self._parts.embed(self._numbers[5, :width], self._numbers[0, :width])
            if self._rows is not None:
                self._rows.numbers.copy_(self._numbers[:NUMBERS, None])
            hidden, p = runner.level_of(embedded, self.carried, self)
            if self._count:
                self._found.copy_(top_rows(runner.logits, self._count, self._sharpness, p))
            return torch.cat([hidden, p], dim=-1)

        return level

    def slow(self, x: Tensor) -> Tensor:
        assert self._rows is not None and self._run is not None
        self._rows.x.copy_(x[None])
        return self._run()[0]

    def both(self, slow: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        x = self.slow(torch.cat([slow, branch]))
        return x[: self._width], x[self._width :]

    def own(self, function: RowsFunction, *inputs: Tensor | None) -> Tensor:
        if self._own is None:
            return function(*inputs, None, None)
        pos, _, prefix, tree, *_, slot = self._numbers[:, : self._width]
        seen = seen_slots(prefix, tree, self._span)
        slots = StaticSlots(pos, slot, seen, self._own.keys[0], self._own.values[0])
        return function(*inputs, slots, None)


def _near(got: Likeliest | None, expected: Likeliest, limit: float) -> bool:
    """Whether probabilities are the same but for rounding; tokens as likely may have changed
    places.
    """
    assert got is not None
    pairs: Sequence[tuple[list[float], list[float]]] = list(zip(got[1], expected[1], strict=True))
    return all(np.allclose(a, b, rtol=10 * limit, atol=limit) for a, b in pairs)
