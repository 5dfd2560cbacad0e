"""What runners of drafts share, on a decoder whose passes are captured: what they compute of a few
rows beside the model's own layers is captured as well (runtime/cuda/captured_rows.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor

from multirate.runtime.cuda.captured_rows import CapturedRows, RowsFunction
from multirate.runtime.cuda.decoder import GraphedDecoder
from multirate.runtime.decoder import Decoder
from multirate.runtime.draft_branch import Likeliest
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import Rows


class CapturedRunner:
    """Functions run as they are where nothing is captured."""

    _captured: CapturedRows | None = None

    def _capture_on(self, decoder: Decoder) -> None:
        """What is computed beside the model's own layers is captured where their passes are."""
        if isinstance(decoder, GraphedDecoder):
            self._captured = CapturedRows(decoder)

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
