"""N-gram lookup: what followed the end of a text when it occurred before [prompt lookup, Saxena
2023]. The kernel has its own version in csrc/lookup.c.
"""

from __future__ import annotations

from collections.abc import Sequence

from multirate.decoding.speculate.text_source import TextSource, following


class TextIndex(TextSource):
    """Every n-gram of one growing text with its latest end, so that a search takes constant time.
    Among the longest matches the latest wins.

    longest: the maximum number of tokens to compare.
    """

    def __init__(self, longest: int) -> None:
        super().__init__(longest)
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def look_up(
        self, text: Sequence[int], most: int, drafted: Sequence[int] = ()
    ) -> tuple[list[int], int]:
        # the n-grams ending in the last token are left out: they are what is looked up
        for end in range(self._indexed + 1, len(text)):
            for n in range(1, min(self.longest, end) + 1):
                self._ends[tuple(text[end - n : end])] = end
        self._indexed = max(self._indexed, len(text) - 1)
        tail = [*text[-self.longest :], *drafted][-self.longest :]
        for n in range(len(tail), 0, -1):
            start = self._ends.get(tuple(tail[-n:]))
            if start is not None:
                return following(text, drafted, start, most), n
        return [], 0
