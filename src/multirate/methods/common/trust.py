"""How far drafts follow what the text said before: what came true of such suggestions lately. [ours]

A suggestion is what followed the end of the text when it occurred before (decoding/ngram.py). It is looked at where
the stream's best token is its first; tree.py says when it is followed, by the rates kept here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_MEMORY = 0.98  # about the last fifty tries
_STRENGTH = 4.0  # tries that the first guess counts as
_STEADY = 0.8
_FADE_ROUNDS, _FADE = 16, 0.72


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
        self._guess = [1 - 0.4 / max(n, 1) for n in range(longest + 1)]
        self._counts = [[[0.0, 0.0] for _ in self._guess] for _ in range(2)]  # tries, and how many held; agree, onward
        self._steady = [_STRENGTH, _STEADY * _STRENGTH]
        self._rounds = 0
        self.agree, self.onward = np.array(self._guess), np.array(self._guess)
        self.steady = _STEADY

    def observe(self, origin: Origin, true_drawn: int, true_followed: int) -> None:
        """A round's draft was of this origin; so many nodes of either kind were accepted. (Plain numbers: arrays this
        small take longer than a draft's level.)"""
        tried = min(origin.drawn, true_drawn + 1)
        if tried:
            _count(self._steady, tried, true_drawn)
            self.steady = self._steady[1] / self._steady[0]
        if origin.followed and true_drawn == origin.drawn:  # else rejected before it came to that
            n = origin.matched
            agree, onward = self._counts[0][n], self._counts[1][n]
            _count(agree, 1, min(true_followed, 1))
            _count(onward, min(origin.followed, true_followed + 1) - 1, max(true_followed - 1, 0))
            self.agree[n], self.onward[n] = self._rate(agree, n), self._rate(onward, n)
        self._rounds += 1
        if self._rounds % _FADE_ROUNDS == 0:
            self._fade()

    def _rate(self, counts: list[float], n: int) -> float:
        return (counts[1] + _STRENGTH * self._guess[n]) / (counts[0] + _STRENGTH)

    def _fade(self) -> None:
        """Towards the first guesses, so that a length that disappointed is tried again some day."""
        for counts, rates in zip(self._counts, (self.agree, self.onward), strict=True):
            for n, one in enumerate(counts):
                one[:] = (_FADE * count for count in one)
                rates[n] = self._rate(one, n)


def _count(counts: list[float], tries: int, held: int) -> None:
    forget = _MEMORY**tries
    counts[0] = counts[0] * forget + tries
    counts[1] = counts[1] * forget + held
