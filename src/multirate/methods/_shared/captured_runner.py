"""What runners of drafts share, on a decoder whose passes are captured: what they compute of a few
rows beside the model's own layers is captured as well (runtime/cuda/captured_rows.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

from torch import Tensor

from multirate.runtime.captured import CapturedRows, RowsFunction, likeliest_of, top_rows
from multirate.runtime.decoder import Decoder
from multirate.runtime.draft_branch import Likeliest
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import Rows


class CapturedRunner:
    """Functions run as they are where nothing is captured."""

    _captured: CapturedRows | None = None

    def _capture_on(self, decoder: Decoder) -> None:
        """What is computed beside the model's own layers is captured where their passes are."""
        self._captured = decoder.captured_rows()

    def _alone(self, name: Hashable, function: RowsFunction, *inputs: Tensor) -> Tensor:
        """function(*inputs) of rows that do not look at one another; as CapturedRows.alone."""
        if self._captured is None:
            return function(*inputs)
        return self._captured.alone(name, function, *inputs)

    def _over(
        self, function: RowsFunction, rows: Rows, own: KVCache | None, *inputs: Tensor
    ) -> Tensor:
        """function(*inputs, rows, own) of rows that look at an own layer's K/V, if there is one."""
        if self._captured is None or own is None:
            return function(*inputs, rows, own)
        return self._captured.with_cache("own layer", function, rows, own, *inputs)

    def _top_captured(
        self,
        captured: CapturedRows,
        logits: Callable[[Tensor], Tensor],
        x: Tensor,
        count: int,
        sharpness: float = 1.0,
    ) -> Likeliest:
        """The `count` likeliest tokens by logits(x) [n, V] of each row of x [n, d] and their
        probabilities under softmax(sharpness · logits), best first.
        """
        found = captured.alone(
            ("top", count, sharpness),
            partial(top_rows, logits, count, sharpness),
            x,
            judged=lambda out: out.chunk(2, -1)[1],
        )
        return likeliest_of(found)
