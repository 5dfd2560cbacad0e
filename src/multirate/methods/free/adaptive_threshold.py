"""FREE's adaptive threshold estimator (arXiv 2310.05424, section 3.3).

Tokens that left wait for their deeper layers, and once these have run it is known whether they say
the same. The confidences of those that agreed and of those that did not are taken for two Beta
distributions, fitted by their moments,

    α = m · (m (1 − m) / v − 1),   β = α · (1 − m) / m,

with m and v a kind's mean and variance, and the threshold is the least confidence from which on

    Beta(c | agreed) / (Beta(c | agreed) + Beta(c | not)) ≥ posterior.

As in the authors' code, the two are weighed alike however often each was seen, and the threshold
moves between texts only. [ours: it moves once LEAST_PAIRS of both kinds were seen; any confidence
from 0.3 on may be the threshold, where theirs ends at 0.9, too little beside a frozen base]
"""

from __future__ import annotations

import math
from itertools import takewhile

LEAST_PAIRS = 10
LOWEST = 0.3
GRID = 1000
"""Thresholds that are tried: LOWEST and so many steps to 1 − EPS."""
EPS = 1e-4
"""Confidences are kept this far from 0 and 1, where a Beta distribution's density may not exist."""


class _Moments:
    """Of confidences of one kind."""

    def __init__(self) -> None:
        self.count, self._sum, self._squares = 0, 0.0, 0.0

    def add(self, confidence: float) -> None:
        self.count += 1
        self._sum += confidence
        self._squares += confidence * confidence

    def beta(self) -> tuple[float, float] | None:
        """(α, β); None where there are too few, or all the same."""
        if self.count < LEAST_PAIRS:
            return None
        mean = self._sum / self.count
        variance = self._squares / self.count - mean * mean
        if variance < 1e-12:
            return None
        # never more than m (1 − m), the variance of a coin: α and β are 0 or more
        alpha = mean * max(mean * (1 - mean) / variance - 1, EPS)
        return alpha, alpha * (1 - mean) / mean


class AdaptiveThreshold:
    """The least confidence with which tokens leave, `first` until enough is known.

    posterior: from 0 to 1, both excluded; the paper: 0.4. threshold: None where no confidence has
    it.
    """

    def __init__(self, first: float, posterior: float) -> None:
        self.threshold: float | None = first
        self._least_log_odds = math.log(posterior / (1 - posterior))
        self._agreed, self._not = _Moments(), _Moments()

    def observe(self, confidence: float, agreed: bool) -> None:
        """A token's confidence at the exit, and whether the last layer says the same there."""
        kind = self._agreed if agreed else self._not
        kind.add(min(max(confidence, EPS), 1 - EPS))

    def update(self) -> None:
        """Moves the threshold to what was observed."""
        agreed, other = self._agreed.beta(), self._not.beta()
        if agreed is None or other is None:
            return
        tried = [LOWEST + (1 - EPS - LOWEST) * step / GRID for step in range(GRID + 1)]
        trusted = list(
            takewhile(
                lambda c: (
                    _log_density(c, *agreed) - _log_density(c, *other) >= self._least_log_odds
                ),
                reversed(tried),
            )
        )
        self.threshold = trusted[-1] if trusted else None


def _log_density(x: float, alpha: float, beta: float) -> float:
    """log Beta(x | alpha, beta)."""
    scale = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
    return (alpha - 1) * math.log(x) + (beta - 1) * math.log1p(-x) - scale
