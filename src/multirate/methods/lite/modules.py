"""LITE's exits beside a frozen base [ours: the paper tunes the base itself]."""

from __future__ import annotations

from multirate.methods.common.linear_exits import LinearExits
from multirate.methods.lite.config import LiteConfig


class LiteExits(LinearExits):
    """A linear map for each exit."""

    config: LiteConfig
