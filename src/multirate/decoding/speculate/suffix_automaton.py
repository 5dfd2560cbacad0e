"""A suffix automaton that finds the longest end of a text that occurred before [Blumer et al. 1985;
for drafts: SAM-Decoding, Hu et al. 2024]. The kernel has its own version in csrc/automaton.c.
"""

from __future__ import annotations

from collections.abc import Sequence

from multirate.decoding.speculate.text_source import TextSource, following

MAX_NESTED = 64  # csrc/automaton.c has it, too


class SuffixAutomaton(TextSource):
    """A suffix automaton of one text. Adding a token takes amortised constant time, and matches may
    have any length.

    A state stands for the substrings that end at the same places; the longest has `length` tokens,
    and `link` leads to the state of its longest suffix that also occurs elsewhere. The link of the
    whole text's state therefore leads to the longest end that occurred before.

    Among the places where a match ended the latest wins. A new token updates the places of the
    text's MAX_NESTED longest ends; in a text that nests more of them, a shorter end may be taken
    from an earlier place.

    longest: the maximum match length to report.
    """

    def __init__(self, longest: int) -> None:
        super().__init__(longest)
        # by state; 0 is the empty text's. ends: tokens of the text up to the latest known place
        self._length, self._link, self._ends = [0], [-1], [0]
        self._next: list[dict[int, int]] = [{}]
        self._last = self._count = 0  # the whole text's state and length

    def look_up(
        self, text: Sequence[int], most: int, drafted: Sequence[int] = ()
    ) -> tuple[list[int], int]:
        for token in text[self._count :]:
            self._add(token)
        state = max(self._link[self._last], 0)
        matched = self._length[state]
        for token in drafted:
            state, matched = self._follow(state, matched, token)
        if not matched:
            return [], 0
        return following(text, drafted, self._ends[state], most), min(matched, self.longest)

    def _add(self, token: int) -> None:
        self._renew_ends()
        self._count += 1
        new, state = self._new_state(self._count, 0, self._count, {}), self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._split(state, token)
        self._last = new

    def _renew_ends(self) -> None:
        """The ends of the text so far occurred at its end."""
        state = self._link[self._last]
        for _ in range(MAX_NESTED):
            if state <= 0:
                break
            self._ends[state] = self._count
            state = self._link[state]

    def _split(self, state: int, token: int) -> int:
        """The state of the parts that end in `state`'s longest one and `token`; a new one, if they
        shared a state with longer parts.
        """
        shared = self._next[state][token]
        length = self._length[state] + 1
        if self._length[shared] == length:
            return shared
        copy = self._new_state(
            length, self._link[shared], self._ends[shared], dict(self._next[shared])
        )
        while state >= 0 and self._next[state].get(token) == shared:
            self._next[state][token] = copy
            state = self._link[state]
        self._link[shared] = copy
        return copy

    def _new_state(self, length: int, link: int, ends: int, following: dict[int, int]) -> int:
        self._length.append(length)
        self._link.append(link)
        self._ends.append(ends)
        self._next.append(following)
        return len(self._length) - 1

    def _follow(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """The longest end of a match in `state` and `token` that occurred before the text's last
        token: its state and length.
        """
        while True:
            found = self._next[state].get(token, self._last)
            if found != self._last:  # the last state's parts occur at the text's end alone
                return found, matched + 1
            if state == 0:
                return 0, 0
            state = self._link[state]
            matched = self._length[state]
