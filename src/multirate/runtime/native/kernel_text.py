"""A sequence's text where the kernel looks it up: its tokens, their suffix automaton and the other
texts beside it (csrc/lookup.c, automaton.c).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from multirate.runtime.fused import Lookups
from multirate.runtime.native import abi, library


class KernelText:
    """Owns the memory of a step's `text`, which the kernel reads and appends to.

    step: the SpeculativeStep whose text it is; it must outlive this. tokens: that one step adds at
    most. lookups: where it is looked up.
    """

    def __init__(self, step: abi.CData, tokens: int, lookups: Lookups) -> None:
        self._library = library.kernel()
        self._text, self._at = step.text, abi.ffi.addressof(step, "text")
        self._added = tokens
        self._tokens, self._most = np.empty(0, np.int32), 0
        self._found = np.empty(tokens, np.int64)
        self._found_at = abi.longs(self._found)
        self._automaton = abi.new("Automaton") if lookups.automaton else None
        if self._automaton is not None:
            self._text.automaton = self._automaton
        if (given := lookups.given) is not None:
            texts = abi.new(
                "GivenTexts",
                tokens=abi.ints(given.tokens),
                order=abi.ints(given.order),
                count=len(given.tokens),
            )
            self._given = given, texts  # the kernel reads them by address
            self._text.given = texts

    def __len__(self) -> int:
        return int(self._text.count)

    def set(self, tokens: Sequence[int] | np.ndarray, room: int = 1024) -> None:
        """All tokens so far; none: nothing is looked up. room: for so many more, before the text
        has to move.
        """
        self._tokens = np.empty(len(tokens) + room + 2 * self._added, np.int32)
        self._tokens[: len(tokens)] = tokens
        self._most = len(tokens) + room
        self._text.tokens = abi.ints(self._tokens) if len(tokens) else abi.NULL
        self._text.count = len(tokens)
        if self._automaton is not None and len(tokens):
            # it takes the text in again: no more often than the text's room doubles
            room = len(self._tokens)
            self._memory = np.empty(self._library.mr_automaton_words(room), np.int32)
            self._automaton.memory, self._automaton.room = abi.ints(self._memory), room
            self._library.mr_automaton_clear(self._automaton)

    def make_room(self) -> None:
        """Room for a step."""
        if self._text.count > self._most:
            self.set(self._tokens[: len(self)], room=len(self._tokens))

    def look_up(self, longest: int, most: int) -> tuple[list[int], int]:
        """What the text had after the tokens it ends in, as `TextSource.look_up`. longest: of an
        n-gram that is looked up.
        """
        matched = self._library.mr_look_up(self._at, 0, longest, most, self._found_at)
        return (self._found[:most].tolist() if matched else []), matched
