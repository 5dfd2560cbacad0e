"""Cuts a text before its first stop string, also while it is still growing."""

from __future__ import annotations

from collections.abc import Sequence


def held_back(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = max((len(marker) for marker in markers), default=0) - 1
    for count in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-count:]) for marker in markers):
            return count
    return 0


def first_end(text: str, markers: Sequence[str]) -> tuple[int, int] | None:
    """Where the marker begins and ends that is complete first; of several that end there, the
    longest.
    """
    found = [
        (place + len(marker), place) for marker in markers if (place := text.find(marker)) >= 0
    ]
    if not found:
        return None
    end, begin = min(found)
    return begin, end


class StopStrings:
    """Passes a growing text on, up to the stop string that is complete first. What may be the
    beginning of one is held back, so the result does not depend on how the text arrives.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._waiting = ""
        self.met = False
        """Whether a stop string has occurred."""

    def push(self, text: str) -> str:
        """Adds text; returns what may be shown now."""
        if self.met:
            return ""
        self._waiting += text
        found = first_end(self._waiting, self._strings)
        if found is not None:
            self.met = True
            shown, self._waiting = self._waiting[: found[0]], ""
            return shown
        count = held_back(self._waiting, self._strings)
        cut = len(self._waiting) - count
        shown, self._waiting = self._waiting[:cut], self._waiting[cut:]
        return shown

    def end(self) -> str:
        """What was held back, as nothing follows."""
        shown, self._waiting = self._waiting, ""
        return shown
