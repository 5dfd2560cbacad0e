"""Committed tokens that wait for a trained stream: its own layer has not read them yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def newest(
    ids: list[int], carried: list[Tensor], count: int | None
) -> tuple[list[int], list[Tensor]]:
    """The last `count` of tokens and of what is carried of each, [len(ids), d] in pieces, if any;
    None: all.
    """
    if count is None or len(ids) <= count:
        return ids, carried
    return ids[-count:], [torch.cat(carried)[-count:].clone()] if carried else []


@dataclass
class WaitingTokens:
    """What a sequence's next draft must know: committed tokens that the stream's own layer has not
    read with their true carried residuals, and the last token's carried residual.
    """

    ids: list[int]
    carried: list[Tensor]  # [len(ids), d] in pieces: what is carried of the token before each;
    # empty after fused steps of a stream that reads none
    last: Tensor  # [d]: what is carried of the last committed token

    def add(self, ids: Sequence[int], carried: Tensor) -> None:
        self.ids += ids
        self.carried.append(carried)

    def keep_newest(self, count: int | None) -> bool:
        """Only the last `count` tokens; None: all. Returns whether there were more."""
        before = len(self.ids)
        self.ids, self.carried = newest(self.ids, self.carried, count)
        return len(self.ids) < before

    def keep(self, count: int) -> None:
        """Only the first `count` tokens."""
        self.ids = self.ids[:count]
        known = self.ids and self.carried
        self.carried = [torch.cat(self.carried)[:count].clone()] if known else []
