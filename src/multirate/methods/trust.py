"""How far drafts follow what the text said before: what came true of such suggestions lately. [ours]

A suggestion is what followed the end of the text when it occurred before (decoding/lookup.py). It is looked at where
the stream's best token is its first; tree.py says when it is followed, by the rates kept here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_MEMORY = 0.98  # about the last fifty tries
_STRENGTH = 4.0  # tries that the first guess counts as
_STEADY = 0.8


class Origin(NamedTuple):
    """Where the nodes of a draft come from: so many that the stream drew, then `followed` of a suggestion that matched
    `matched` tokens of the text."""

    drawn: int
    followed: int = 0
    matched: int = 0


class Trust:
    """Running rates, for suggestions that match up to `longest` tokens.

    agree, onward [longest + 1], by matched length: the chance that a suggestion's first token is the model's when the
    stream's best is the same, and that each next one is. steady: that the stream's own next level is.
    """

    def __init__(self, longest: int) -> None:
        # first guesses: 0.6 after one matched token, 0.8 after two, 0.9 after four
        self._guess = 1 - 0.4 / np.maximum(np.arange(longest + 1), 1)
        self._tries, self._held = np.zeros((2, longest + 1)), np.zeros((2, longest + 1))
        self._steady_tries, self._steady_held = _STRENGTH, _STEADY * _STRENGTH
        self.agree, self.onward = self._guess.copy(), self._guess.copy()
        self.steady = _STEADY

    def observe(self, origin: Origin, true_drawn: int, true_followed: int) -> None:
        """A round's draft was of this origin; so many nodes of either kind were accepted."""
        tried = min(origin.drawn, true_drawn + 1)
        if tried:
            self._steady_tries = self._steady_tries * _MEMORY**tried + tried
            self._steady_held = self._steady_held * _MEMORY**tried + true_drawn
            self.steady = self._steady_held / self._steady_tries
        if not origin.followed or true_drawn < origin.drawn:  # rejected before it came to that
            self._tries *= _MEMORY  # so that one that disappointed is tried again some day
            self._held *= _MEMORY
        else:
            onward = min(origin.followed, true_followed + 1) - 1
            for kind, tries, held in ((0, 1, min(true_followed, 1)), (1, onward, max(true_followed - 1, 0))):
                forget = _MEMORY**tries
                self._tries[kind, origin.matched] = self._tries[kind, origin.matched] * forget + tries
                self._held[kind, origin.matched] = self._held[kind, origin.matched] * forget + held
        rates = (self._held + _STRENGTH * self._guess) / (self._tries + _STRENGTH)
        self.agree[:], self.onward[:] = rates
