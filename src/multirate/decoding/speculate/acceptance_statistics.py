"""How often drafts were accepted lately: by confidence, by source, and in total.

All estimators count tries and hits that fade over time, and use a first guess while there are few.
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
_TEXT_MEMORY, _TEXT_STRENGTH = 0.99, 2.0  # of continuations, told after every step
_AGAINST = 0.3  # of a continuation whose first token is not the branch's
_AGAINST_OF_OTHERS = 0.05  # of one in other texts
_FADE_STEPS, _FADE = 16, 0.72
CONFIDENCE_BINS = 10  # csrc/include/speculate.h has it, too
_STEP_MEMORY, _DRAFT_STRENGTH = 0.95, 3.0  # of DraftedSteps: about the last twenty steps
_USUAL_MEMORY = 0.995  # of the steps of all texts: about the last two hundred
_KEPT_OF_LAST_TEXT = 0.5  # of what is known by length of match
_ENOUGH_LEVELS = 64  # drafted levels after which what was observed outweighs a first guess


@dataclass
class DecayedRate:
    """Share of successful tries among about the last 1 / (1 − memory). Uses plain numbers, because
    small arrays cost more time than a draft level.
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
        """Reduces the weight of everything seen so far to this share."""
        self.tries *= share
        self.hits *= share

    def rate(self, guess: float, strength: float = STRENGTH) -> float:
        """The rate, with a guess that counts as `strength` tries."""
        return (self.hits + strength * guess) / (self.tries + strength)


def _bin(confidence: float) -> int:
    """NaN counts as no confidence."""
    if not confidence > 0.0:
        return 0
    return min(int(min(confidence, 1.0) * CONFIDENCE_BINS), CONFIDENCE_BINS - 1)


class Calibration:
    """Maps a drafter's confidence in its token (0..1) to the rate at which such tokens were
    accepted lately.

    tries, hits: float64 [CONFIDENCE_BINS], which the kernel reads (csrc/draft.c, calibrated).
    """

    def __init__(self) -> None:
        self.tries, self.hits = np.zeros(CONFIDENCE_BINS), np.zeros(CONFIDENCE_BINS)

    def __call__(self, confidence: float) -> float:
        k = _bin(confidence)
        return float((self.hits[k] + STRENGTH * confidence) / (self.tries[k] + STRENGTH))

    def observe_one(self, confidence: float, accepted: bool) -> None:
        """Records whether a token of this confidence, whose predecessors were accepted, was
        accepted.
        """
        k = _bin(confidence)
        self.tries[k] = MEMORY * self.tries[k] + 1.0
        self.hits[k] = MEMORY * self.hits[k] + accepted

    def observe(self, confidences: Sequence[float], accepted: int) -> None:
        """Records a chain drafted with these confidences, whose first `accepted` tokens were
        accepted.
        """
        for i, confidence in enumerate(confidences[: accepted + 1]):
            self.observe_one(confidence, i < accepted)


class Origin(NamedTuple):
    """Where a draft's nodes come from: `drafted` nodes of the draft branch, then `continued` nodes
    of text lookup after a match of `matched` tokens.
    """

    drafted: int
    continued: int = 0
    matched: int = 0


class ContinuationRates:
    """How far to follow text lookup (ngram.py), by how its recent continuations were accepted.

    longest: maximum match length in the text itself.
    told: maximum of all match numbers. Numbers above `longest` are matches in other texts
        (given_texts.py), which count from there. None: there are no other texts.

    Rates by match number, [told + 1]: first_accepted, the chance that a continuation's first token
    is the model's if the draft branch prefers the same token; first_against, if it prefers another;
    first_alone, without a draft branch; next_accepted, for each further token. draft_accepted: the
    same for the draft branch's own next level.
    """

    def __init__(self, longest: int, told: int | None = None) -> None:
        self.longest = longest if told is None else told
        # first guesses: 0.6 after one matched token, 0.8 after two, 0.9 after four; other texts
        # say less: 0.28 after two, 0.52 after eight
        others = range(1, self.longest - longest + 1)
        self._guess = [1 - 0.4 / max(n, 1) for n in range(longest + 1)]
        self._guess += [0.2 + 0.04 * n for n in others]
        self._guess_against = [_AGAINST] * (longest + 1) + [_AGAINST_OF_OTHERS for _ in others]
        self._guess_alone = [0.8 * guess for guess in self._guess]
        self._alone = [DecayedRate(_TEXT_MEMORY) for _ in self._guess]
        self._against = [DecayedRate() for _ in self._guess]
        self.first_alone = np.array(self._guess_alone, np.float64)
        self.first_against = np.array(self._guess_against, np.float64)
        self._first = [DecayedRate() for _ in self._guess]
        self._next = [DecayedRate(_TEXT_MEMORY) for _ in self._guess]
        self._draft = DecayedRate(tries=STRENGTH, hits=STRENGTH * _DRAFT_ACCEPTED)
        self._steps = 0
        self.first_accepted, self.next_accepted = (
            np.array(self._guess, np.float64) for _ in range(2)
        )
        self.draft_accepted = _DRAFT_ACCEPTED

    def observe(self, origin: Origin, accepted_drafted: int, accepted_continued: int) -> None:
        """Records how many nodes of a draft of this origin were accepted."""
        tried = min(origin.drafted, accepted_drafted + 1)
        if tried:
            self._draft.observe(tried, accepted_drafted)
            self.draft_accepted = self._draft.rate(0.0, 0.0)
        if (
            origin.continued and accepted_drafted == origin.drafted
        ):  # else rejected before it came to that
            n = origin.matched
            self._first[n].observe(1, min(accepted_continued, 1))
            if origin.drafted:  # else `observe_text` has counted it
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

    def observe_text(
        self,
        continuation: Sequence[int],
        matched: int,
        emitted: Sequence[int],
        best: int | None = None,
    ) -> None:
        """Records what the text continued with after a match of `matched` tokens, and what the
        model chose; known after every step, whatever its draft was. best: the draft branch's best
        first token, if there is one.
        """
        held = 0
        for token, truth in zip(continuation, emitted, strict=False):
            if token != truth:
                break
            held += 1
        self._alone[matched].observe(1, min(held, 1))
        self.first_alone[matched] = self._alone[matched].rate(
            self._guess_alone[matched], _TEXT_STRENGTH
        )
        if best is not None and best != continuation[0]:
            self._against[matched].observe(1, min(held, 1))
            self.first_against[matched] = self._against[matched].rate(self._guess_against[matched])
        if held:
            tried = min(held + 1, len(emitted), len(continuation)) - 1
            self._next[matched].observe(tried, held - 1)
            self.next_accepted[matched] = self._next[matched].rate(self._guess[matched])

    def _publish(self, n: int) -> None:
        guess = self._guess[n]
        self.first_accepted[n], self.next_accepted[n] = (
            self._first[n].rate(guess),
            self._next[n].rate(guess),
        )


class DraftedSteps:
    """What steps with drafts brought lately, by match length in the text: accepted tokens, levels
    and nodes.

    accepted: the first guess of the tokens that a step's draft adds. weight: how many steps this
    counts as. A new text starts from all earlier texts, not only from the last one, because a few
    unsuitable texts say little about the next.
    """

    def __init__(self, longest: int, accepted: float, weight: float) -> None:
        # weight, accepted, levels, nodes: plain numbers, as in DecayedRate
        self._all = [weight, weight * accepted, weight, weight * max(accepted, 1.0)]
        self._usual, self._weight = self._all, weight
        self._by_match = [[0.0] * 4 for _ in range(longest + 1)]

    def means(self, matched: int) -> tuple[float, float, float]:
        """Average accepted tokens, levels and nodes of a step with this match length."""
        steps, accepted, levels, nodes = self._all
        accepted, levels, nodes = accepted / steps, levels / steps, nodes / steps
        if len(self._by_match) == 1:  # of one length both saw the same steps
            return accepted, levels, nodes
        of, its_accepted, its_levels, its_nodes = self._by_match[matched]
        steps = of + _DRAFT_STRENGTH
        return (
            (its_accepted + _DRAFT_STRENGTH * accepted) / steps,
            (its_levels + _DRAFT_STRENGTH * levels) / steps,
            (its_nodes + _DRAFT_STRENGTH * nodes) / steps,
        )

    def begin_text(self) -> None:
        """A new text starts."""
        share = self._weight / self._usual[0]
        self._all = [share * count for count in self._usual]
        self._by_match = [
            [_KEPT_OF_LAST_TEXT * count for count in counts] for counts in self._by_match
        ]

    def observe(self, matched: int, accepted: int, levels: int, nodes: int) -> None:
        """Records one step."""
        self._all = _faded(self._all, _STEP_MEMORY, accepted, levels, nodes)
        self._usual = _faded(self._usual, _USUAL_MEMORY, accepted, levels, nodes)
        known = self._by_match[matched]
        self._by_match[matched] = _faded(known, _STEP_MEMORY, accepted, levels, nodes)


def _faded(
    counts: list[float], memory: float, accepted: int, levels: int, nodes: int
) -> list[float]:
    """What was counted, and another step with these."""
    steps, all_accepted, all_levels, all_nodes = counts
    return [
        memory * steps + 1.0,
        memory * all_accepted + accepted,
        memory * all_levels + levels,
        memory * all_nodes + nodes,
    ]


class OverallRates:
    """A drafter's acceptance over all generations of the engine; at first the model card's.

    prior: acceptance by depth, as measured in training; empty: unknown.
    """

    def __init__(self, prior: Sequence[float] = ()) -> None:
        self._prior = list(prior)
        self._levels = DecayedRate(memory=1.0)
        self._steps = 0

    def observe(self, steps: int, levels: int, accepted: int) -> None:
        """Records that `steps` steps of one sequence each drafted `levels` levels, with `accepted`
        tokens accepted.
        """
        self._levels.observe(levels, accepted)
        self._steps += steps

    def rates(self) -> list[float] | float | None:
        """Acceptance per depth from the card, or per token as observed; None: nothing is known
        yet.
        """
        seen = self._levels
        if seen.tries >= _ENOUGH_LEVELS:
            return per_token_rate(seen.hits / self._steps, seen.tries / self._steps)
        return self._prior or None


def per_token_rate(accepted: float, length: float) -> float:
    """The acceptance per drafted token, a, at which chains of `length` have `accepted` tokens
    accepted on average.

    Solves a + a² + … + a^length = accepted (tokens after the first rejection are never accepted);
    at most 1.
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
