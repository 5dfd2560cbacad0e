"""Committed tokens that wait for a trained stream: its own layer has not read them yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class UnreadTokens:
    """Tokens that the stream's own layer has not read with their true carried residuals.

    carried: [len(ids), d] in pieces, what is carried of the token before each; empty for a stream
    that reads none.
    """

    ids: list[int] = field(default_factory=list)
    carried: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: Sequence[int], carried: Tensor | None) -> None:
        self.ids += ids
        if carried is not None:
            self.carried.append(carried)

    def keep_newest(self, count: int | None) -> bool:
        """Only the last `count` tokens; None: all. Returns whether there were more."""
        if count is None or len(self.ids) <= count:
            return False
        self.ids = self.ids[-count:]
        self.carried = [torch.cat(self.carried)[-count:].clone()] if self.carried else []
        return True

    def keep(self, count: int) -> None:
        """Only the first `count` tokens."""
        self.ids = self.ids[:count]
        known = self.ids and self.carried
        self.carried = [torch.cat(self.carried)[:count].clone()] if known else []

    def clear(self) -> None:
        self.ids, self.carried = [], []


@dataclass
class WaitingTokens(UnreadTokens):
    """What a sequence's next draft must know: its unread tokens, and `last` [d], what is carried of
    its last committed token.
    """

    last: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32, device="cpu"))
