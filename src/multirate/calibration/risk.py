"""The statistics of a promise: Learn-then-Test [Angelopoulos et al. 2021] with fixed-sequence
testing.

A sample is a prompt, its loss in [0, 1]. For each threshold, from the most cautious to the boldest,
the hypothesis "its expected loss is above the risk" is tested; the first that cannot be rejected at
level 1 − confidence ends the sequence. The probability that the last rejected one was true is at
most that level, however many were tested. Nothing is assumed of how loss and threshold hang
together; prompts are assumed to be drawn independently from what the promise is to hold for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tested:
    """One threshold's test. losses: of the samples looked at, all of them where it held; looking
    ends early when no losses of the rest could make it hold.
    """

    threshold: float
    losses: tuple[float, ...]
    p_value: float
    holds: bool

    @property
    def mean(self) -> float:
        """Mean loss of the samples looked at."""
        return sum(self.losses) / max(1, len(self.losses))


def p_value(mean_loss: float, samples: int, risk: float) -> float:
    """Hoeffding–Bentkus p-value of "the expected loss is above `risk`" [Bates et al. 2021].

    mean_loss of `samples` independent losses in [0, 1]; risk in (0, 1).
    """
    mean = min(mean_loss, risk)
    divergence = (1 - mean) * math.log((1 - mean) / (1 - risk))
    if mean > 0:
        divergence += mean * math.log(mean / risk)
    hoeffding = math.exp(-samples * divergence)
    # a sum of rounded shares must not count as one more than it is
    bentkus = math.e * binomial_cdf(math.ceil(samples * mean_loss - 1e-9), samples, risk)
    return min(1.0, hoeffding, bentkus)


def binomial_cdf(successes: int, trials: int, chance: float) -> float:
    """P(X <= successes) of X ~ Binomial(trials, chance), chance in (0, 1)."""
    if successes >= trials:
        return 1.0
    logs = [
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(chance)
        + (trials - k) * math.log1p(-chance)
        for k in range(successes + 1)
    ]
    return min(1.0, math.fsum(map(math.exp, logs)))


def samples_needed(risk: float, confidence: float) -> int:
    """How many samples without any loss it takes to reject at all: fewer can promise nothing."""
    return math.ceil(math.log(1 - confidence) / math.log1p(-risk) - 1e-9)


@functools.cache
def most_loss(samples: int, risk: float, confidence: float) -> float:
    """The largest mean loss of so many samples with which a threshold still holds; below 0 where
    none does.
    """
    if p_value(0.0, samples, risk) > 1 - confidence:
        return -1.0
    low, high = 0.0, risk
    for _ in range(50):  # the p-value does not fall with the loss
        middle = (low + high) / 2
        low, high = (
            (middle, high) if p_value(middle, samples, risk) <= 1 - confidence else (low, middle)
        )
    return low


def try_threshold(
    threshold: float, losses: Iterable[float], samples: int, risk: float, confidence: float
) -> Tested:
    """Whether the expected loss at this threshold is at most `risk`, at this confidence; takes
    losses, of which there are `samples`, as long as the answer is open.
    """
    seen: list[float] = []
    total, most = 0.0, samples * most_loss(samples, risk, confidence) + 1e-9
    for loss in losses:
        seen.append(loss)
        total += loss
        if total > most:
            break
    if total > most or len(seen) < samples:
        return Tested(threshold, tuple(seen), 1.0, False)
    p = p_value(math.fsum(seen) / samples, samples, risk)
    return Tested(threshold, tuple(seen), p, p <= 1 - confidence)


def try_in_order(
    path: Sequence[float],
    losses: Callable[[float], Iterable[float]],
    samples: int,
    risk: float,
    confidence: float,
    acceptable: Callable[[float], bool] = lambda threshold: True,
) -> list[Tested]:
    """The tests of the path's thresholds, from the most cautious on, up to the first that does not
    hold. The boldest threshold that may be promised is the last that holds.

    acceptable: of a threshold that would hold, whether it is wanted all the same. Ending sooner
    leaves what was promised before as sure as it was.
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
