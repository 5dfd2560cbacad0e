"""The statistics of a guarantee: Learn-then-Test [Angelopoulos et al. 2021] with fixed-sequence
testing, each test by betting [Waudby-Smith and Ramdas 2023].

A sample is a prompt, its loss in [0, 1]. For each threshold, from the most cautious to the boldest,
the hypothesis "its expected loss is above the risk" is tested; the first that cannot be rejected at
level 1 − confidence ends the sequence. The probability that the last rejected one was true is at
most that level, however many were tested. Nothing is assumed of how loss and threshold hang
together; prompts are assumed to be drawn independently from what the guarantee is to hold for.

The test: whoever stakes a share of a capital of 1 on every loss being below the risk has, after n
losses, the product of 1 + bet · (risk − loss). Where the expected loss is at least the risk, this
cannot grow in expectation, so that it ever reaches 1/p with a probability of at most p (Ville): p
is one over the most that the capital has been, and looking may end as soon as that is enough.
Losses that vary little, as shares of an answer's tokens do, make a capital that a bound from their
mean alone (Hoeffding, Bentkus) cannot see.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

_STAKES = np.array([1.0, 0.75, 0.5, 0.25])
"""Bets as shares of the largest one, with which a loss of 1 takes everything."""
_CAPITAL = np.array([0.7, 0.1, 0.1, 0.1])
"""How the capital is shared among them. Losses that are small, but for chance, want the largest;
the others are for losses that are often 1.
"""


@dataclass(frozen=True)
class Tested:
    """One threshold's test. losses: of the samples looked at; looking ends as soon as the threshold
    holds, or no losses of the rest could make it hold.
    """

    threshold: float
    losses: tuple[float, ...]
    p_value: float
    holds: bool

    @property
    def mean(self) -> float:
        return sum(self.losses) / max(1, len(self.losses))


class Wager:
    """The capital of a test of "the expected loss is at least `risk`", risk in (0, 1), as
    independent losses in [0, 1] come in. p_value: one over the most it has been, at most 1.
    """

    def __init__(self, risk: float) -> None:
        self.risk, self.p_value = risk, 1.0
        self._bets = _STAKES / (1 - risk)
        self._logs: NDArray[np.float64] = np.log(_CAPITAL)

    def add(self, loss: float) -> None:
        kept = np.maximum(0.0, 1 + self._bets * (self.risk - loss))
        with np.errstate(divide="ignore"):  # everything may be lost
            self._logs += np.log(kept)
        self.p_value = min(self.p_value, _one_over(self._logs))

    def best(self, more: int) -> float:
        """The p-value after this many more samples, if none of them has a loss."""
        return min(self.p_value, _one_over(self._logs + more * np.log1p(self._bets * self.risk)))


def _one_over(logs: NDArray[np.float64]) -> float:
    return math.exp(min(700.0, -float(np.logaddexp.reduce(logs))))


def p_value(losses: Iterable[float], risk: float) -> float:
    """Of "the expected loss is at least `risk`", given independent losses in [0, 1]."""
    wager = Wager(risk)
    for loss in losses:
        wager.add(loss)
    return wager.p_value


def samples_needed(risk: float, confidence: float) -> int:
    """The number of samples without any loss that rejection needs; fewer cannot establish
    anything.
    """
    wager = Wager(risk)
    least = math.floor(math.log(1 - confidence) / math.log1p(-risk))  # if all stake everything
    return next(n for n in itertools.count(max(1, least)) if _rejected(wager.best(n), confidence))


def try_threshold(
    threshold: float, losses: Iterable[float], samples: int, risk: float, confidence: float
) -> Tested:
    """Whether the expected loss at this threshold is at most `risk`, at this confidence. Takes
    losses, at most `samples`, until the answer is known.
    """
    seen: list[float] = []
    wager = Wager(risk)
    for loss in losses:
        seen.append(loss)
        wager.add(loss)
        holds = _rejected(wager.p_value, confidence)
        if holds or not _rejected(wager.best(samples - len(seen)), confidence):
            return Tested(threshold, tuple(seen), wager.p_value if holds else 1.0, holds)
    return Tested(threshold, tuple(seen), 1.0, False)


def _rejected(p: float, confidence: float) -> bool:
    # a product of rounded shares must not count as more than it is
    return p <= (1 - confidence) * (1 + 1e-9)


def try_in_order(
    path: Sequence[float],
    losses: Callable[[float], Iterable[float]],
    samples: int,
    risk: float,
    confidence: float,
    acceptable: Callable[[float], bool] = lambda threshold: True,
) -> list[Tested]:
    """Tests the path's thresholds, from the most cautious on, up to the first that does not hold.
    The last that holds is the boldest valid one.

    acceptable: whether a threshold that holds is wanted. Ending early does not weaken the earlier
    results.
    """
    tested: list[Tested] = []
    for threshold in path:
        one = try_threshold(threshold, losses(threshold), samples, risk, confidence)
        if one.holds and not acceptable(threshold):
            one = replace(one, holds=False)
        tested.append(one)
        if not one.holds:
            break
    return tested
