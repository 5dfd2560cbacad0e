"""What followed the end of a text when it occurred before [prompt lookup, Saxena 2023]. In the
kernel: csrc/ngram.c.
"""

from __future__ import annotations

from collections.abc import Sequence


class TextIndex:
    """Every n-gram of one growing text by where it ended last, so that a search costs the same
    however long it is.

    longest: tokens of the end that are compared, at most. The text may only grow.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def look_up(
        self, text: Sequence[int], most: int, drafted: Sequence[int] = ()
    ) -> tuple[list[int], int]:
        """(what followed the end of text + drafted, length of the match), the latest of the longest
        matches.

        The match ended within `text`, before its last token. What followed has `most` tokens: at
        the end of text + drafted it goes round, as a text that repeats itself does. ([], 0) where
        not even the last token occurred.
        """
        # the n-grams ending in the last token are left out: they are what is looked up
        for end in range(self._indexed + 1, len(text)):
            for n in range(1, min(self.longest, end) + 1):
                self._ends[tuple(text[end - n : end])] = end
        self._indexed = max(self._indexed, len(text) - 1)
        count = len(text) + len(drafted)
        tail = [*text[-self.longest :], *drafted][-self.longest :]
        for n in range(len(tail), 0, -1):
            start = self._ends.get(tuple(tail[-n:]))
            if start is not None:
                followed = [*text[start : start + most], *drafted][:most]
                while len(followed) < most:
                    followed.append(followed[len(followed) - (count - start)])
                return followed, n
        return [], 0
