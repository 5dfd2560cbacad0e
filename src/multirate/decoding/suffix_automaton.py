"""The longest end of a text that occurred before, and where, by a suffix automaton [Blumer et al.
1985; for drafts: SAM-Decoding, Hu et al. 2024]. In the kernel: csrc/automaton.c.
"""

from __future__ import annotations

from collections.abc import Sequence

from multirate.decoding.text_source import TextSource, following

MAX_NESTED = 64  # csrc/automaton.c has it, too


class SuffixAutomaton(TextSource):
    """A suffix automaton of one text: a token more costs the same, amortised, however long the text
    is, and matches may be of any length.

    A state stands for the parts of the text that end at the same places; the longest of them has
    `length` tokens, and `link` leads to the state of its longest ending that occurs elsewhere, too.
    So the longest end of the whole text that occurred before is where its own state's link leads.

    Of the places where a match ended the latest is taken. A new token renews the place of the ends
    of the text before it, the MAX_NESTED longest of them: in a text that nests more of them in one
    another, a shorter end may be taken from an earlier place.

    longest: a longer match is told as one of this length.
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
