"""Which part of an answer's text came from whom."""

from __future__ import annotations

from collections import deque

from multirate.decoding.results import Origin

Piece = tuple[str, Origin]
"""A token's text and who proposed the token. Empty where a character takes several tokens: the last
of them has its text.
"""


class Origins:
    """Takes tokens' texts as they are decoded, and hands them out once their text may be shown."""

    def __init__(self) -> None:
        self._waiting: deque[Piece] = deque()
        self._shown = 0
        self._latest: Origin = "model"

    def add(self, text: str, origin: Origin | None = None) -> None:
        """The next token's. origin: None for text of the token before."""
        self._latest = origin or self._latest
        if text or origin:
            self._waiting.append((text, self._latest))

    def take(self, count: int) -> list[Piece]:
        """The tokens whose text is complete now that `count` more characters are shown."""
        self._shown += count
        found = []
        while self._waiting and len(self._waiting[0][0]) <= self._shown:
            found.append(self._waiting.popleft())
            self._shown -= len(found[-1][0])
        return found

    def end(self) -> list[Piece]:
        """The token within which the text ended, at a stop string."""
        cut, self._shown = self._shown, 0
        return [(text[:cut], origin) for text, origin in list(self._waiting)[:1] if cut]
