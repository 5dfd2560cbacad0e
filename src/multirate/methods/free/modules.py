"""FREE's exit beside a frozen base [ours: the paper tunes the base's own layers]."""

from __future__ import annotations

from multirate.methods.common.linear_exits import LinearExits
from multirate.methods.free.config import FreeConfig


class ShallowExit(LinearExits):
    """A linear map at the one exit."""

    config: FreeConfig
