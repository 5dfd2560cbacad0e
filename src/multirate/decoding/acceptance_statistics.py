"""How often drafts were accepted lately: the one estimator, by confidence, by where drafts came
from, and in all.

Everything here counts tries and hits that fade, and leans on a first guess while there are few.
[ours]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MEMORY = 0.98  # about the last fifty tries
STRENGTH = 4.0  # tries that a first guess counts as
_DRAFT_ACCEPTED = 0.8
_FADE_STEPS, _FADE = 16, 0.72
_CONFIDENCE_BINS = 10
_ENOUGH_LEVELS = 64  # drafted levels after which what was observed outweighs a first guess


@dataclass
class DecayedRate:
    """The share of tries that held, of about the last 1 / (1 − memory) tries. Plain numbers: arrays
    this small cost more than a draft's level.
    """

    memory: float = MEMORY
    tries: float = 0.0
    hits: float = 0.0

    def observe(self, tries: int, hits: int) -> None:
        """`hits` of `tries` new tries held."""
        self.fade(self.memory**tries)
        self.tries += tries
        self.hits += hits

    def fade(self, share: float) -> None:
        """Only this share of what was seen counts on."""
        self.tries *= share
        self.hits *= share

    def rate(self, guess: float, strength: float = STRENGTH) -> float:
        """The rate, with a guess that weighs as much as `strength` tries."""
        return (self.hits + strength * guess) / (self.tries + strength)


class Calibration:
    """From a drafter's confidence in its token (0..1) to the rate at which such tokens were
    accepted lately.
    """

    def __init__(self) -> None:
        self._bins = [DecayedRate() for _ in range(_CONFIDENCE_BINS)]

    def __call__(self, confidence: float) -> float:
        return self._bin(confidence).rate(confidence)

    def observe(self, confidences: Sequence[float], accepted: int) -> None:
        """Of a chain drafted with these confidences the first `accepted` tokens were accepted."""
        for i, confidence in enumerate(confidences[: accepted + 1]):
            self._bin(confidence).observe(1, int(i < accepted))

    def _bin(self, confidence: float) -> DecayedRate:
        return self._bins[min(int(confidence * _CONFIDENCE_BINS), _CONFIDENCE_BINS - 1)]


class Origin(NamedTuple):
    """Where the nodes of a draft come from: so many that the stream drew, then `followed` of a
    continuation that matched `matched` tokens of the text.
    """

    drafted: int
    continued: int = 0
    matched: int = 0


class ContinuationRates:
    """How far to follow what the text said before (ngram.py), by what came true of such
    continuations lately.

    first_accepted, next_accepted [longest + 1], by matched length: the chance that a
    continuation's first token is the model's when the stream's best is the same, and that each
    next one is. draft_accepted: that the stream's own next level is.
    """

    def __init__(self, longest: int) -> None:
        # first guesses: 0.6 after one matched token, 0.8 after two, 0.9 after four
        self._guess = [1 - 0.4 / max(n, 1) for n in range(longest + 1)]
        self._first = [DecayedRate() for _ in self._guess]
        self._next = [DecayedRate() for _ in self._guess]
        self._draft = DecayedRate(tries=STRENGTH, hits=STRENGTH * _DRAFT_ACCEPTED)
        self._steps = 0
        self.first_accepted, self.next_accepted = np.array(self._guess), np.array(self._guess)
        self.draft_accepted = _DRAFT_ACCEPTED

    def observe(self, origin: Origin, accepted_drafted: int, accepted_continued: int) -> None:
        """A step's draft was of this origin; so many nodes of either kind were accepted."""
        tried = min(origin.drafted, accepted_drafted + 1)
        if tried:
            self._draft.observe(tried, accepted_drafted)
            self.draft_accepted = self._draft.rate(0.0, 0.0)
        if (
            origin.continued and accepted_drafted == origin.drafted
        ):  # else rejected before it came to that
            n = origin.matched
            self._first[n].observe(1, min(accepted_continued, 1))
            tried_onward = min(origin.continued, accepted_continued + 1) - 1
            self._next[n].observe(tried_onward, max(accepted_continued - 1, 0))
            self._publish(n)
        self._steps += 1
        if self._steps % _FADE_STEPS == 0:
            # towards the first guesses, so that a length that disappointed is tried again some day
            for n in range(len(self._guess)):
                self._first[n].fade(_FADE)
                self._next[n].fade(_FADE)
                self._publish(n)

    def _publish(self, n: int) -> None:
        guess = self._guess[n]
        self.first_accepted[n], self.next_accepted[n] = (
            self._first[n].rate(guess),
            self._next[n].rate(guess),
        )


class OverallRates:
    """A drafter's acceptance over whole generations, none of them forgotten; at first what its card
    says.

    prior: acceptance by depth, as measured in training; empty: unknown.
    """

    def __init__(self, prior: Sequence[float] = ()) -> None:
        self._prior = list(prior)
        self._levels = DecayedRate(memory=1.0)
        self._steps = 0

    def observe(self, steps: int, levels: int, accepted: int) -> None:
        """In `steps` steps of one sequence each, `levels` levels were drafted and `accepted` tokens
        accepted.
        """
        self._levels.observe(levels, accepted)
        self._steps += steps

    def rates(self) -> list[float] | float | None:
        """Acceptance per depth as the card says, or per token as observed; None: nothing is known
        yet.
        """
        seen = self._levels
        if seen.tries >= _ENOUGH_LEVELS:
            return per_token_rate(seen.hits / self._steps, seen.tries / self._steps)
        return self._prior or None


def per_token_rate(accepted: float, length: float) -> float:
    """The acceptance a per drafted token at which chains of `length` have `accepted` tokens
    accepted on average.

    Solves a + a² + … + a^length = accepted (tokens after the first rejection are never accepted); 1
    at most.
    """
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        whole, rest = int(length), length - int(length)
        expected = sum(middle**depth for depth in range(1, whole + 1)) + rest * middle ** (
            whole + 1
        )
        low, high = (middle, high) if expected < accepted else (low, middle)
    return high
