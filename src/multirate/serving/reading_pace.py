"""How many tokens of prompts to read between two steps."""

from __future__ import annotations

_SECONDS = 0.06
"""How long others' streams may wait for a piece of a prompt; a step comes on top."""
_ALONE_SECONDS = 0.16
"""The same if nobody else decodes: as long as a request that comes may wait."""
_LEAST, _MOST = 16, 1024
_MEMORY = 0.7
_FIRST = 1e-3
"""Seconds of a token before the first measurement: a guess that is rather too high."""
_FEW = 16
"""Pieces of fewer tokens tell little about the time of one."""


class ReadingPace:
    """Measures what a token takes, and limits pieces by time."""

    def __init__(self) -> None:
        self._token = _FIRST

    def rows(self, others: bool) -> int:
        """Tokens of the next piece. others: whether other requests are decoding."""
        seconds = _SECONDS if others else _ALONE_SECONDS
        return min(max(int(seconds / self._token), _LEAST), _MOST)

    def took(self, tokens: int, seconds: float) -> None:
        """Records a piece."""
        if tokens >= _FEW:
            self._token = _MEMORY * self._token + (1 - _MEMORY) * seconds / tokens
