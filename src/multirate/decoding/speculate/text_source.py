"""The interface of text lookup: finds where the end of the text occurred before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class TextSource(ABC):
    """Finds what followed the end of one text when it occurred before. The text may only grow.

    longest: the maximum match length to report.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest

    @abstractmethod
    def look_up(
        self, text: Sequence[int], most: int, drafted: Sequence[int] = ()
    ) -> tuple[list[int], int]:
        """(what followed the end of text + drafted, match length in tokens).

        The match ended within `text`, before its last token. The continuation has `most` tokens; at
        the end of text + drafted it starts over, as a repetitive text does. ([], 0) if not even the
        last token occurred before.
        """


def following(text: Sequence[int], drafted: Sequence[int], start: int, most: int) -> list[int]:
    """The `most` tokens of text + drafted from `start` on, starting over at its end."""
    period = len(text) + len(drafted) - start
    tokens = [*text[start : start + most], *drafted][:most]
    while len(tokens) < most:
        tokens.append(tokens[len(tokens) - period])
    return tokens
