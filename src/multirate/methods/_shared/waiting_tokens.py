"""Committed tokens that wait for a draft branch: its own layer has not read them yet."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from multirate.runtime.fused import UnreadTokens


@dataclass
class WaitingTokens(UnreadTokens):
    """What a sequence's next draft must know: its unread tokens, and `last` [d], what is carried of
    its last committed token.
    """

    last: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32, device="cpu"))
