"""What the parts of a speculative step cost, and the price of each further row of a draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StepCosts:
    """Measured seconds of the parts of a speculative step."""

    plain_step: float
    """One plain decoding step."""
    verify: Mapping[int, float]
    """Rows → seconds of verifying that many rows (layers [start, L), head)."""
    draft_step: float
    """One more drafted level."""
    draft_fixed: float = 0.0
    """Drafting's cost per step that does not depend on its length."""

    def verify_seconds(self, rows: int) -> float:
        """Seconds of verifying `rows` rows: linear between the measured counts, and beyond them
        with the last slope.
        """
        known = sorted(self.verify)
        if rows <= known[0] or len(known) == 1:
            return self.verify[known[0]]
        upper = next((i for i, count in enumerate(known) if count >= rows), len(known) - 1)
        left, right = known[upper - 1], known[upper]
        slope = (self.verify[right] - self.verify[left]) / (right - left)
        return self.verify[left] + max(slope, 0.0) * (rows - left)

    def step_seconds(self, length: int, sequences: int = 1) -> float:
        """Seconds of a speculative step with chains of `length` drafted tokens in each of
        `sequences` sequences.

        Length 0: a plain step.
        """
        if length == 0:
            return self.plain_step
        return (
            self.draft_fixed
            + length * self.draft_step
            + self.verify_seconds(sequences * (length + 1))
        )


def expected_tokens(rates: Sequence[float], length: int) -> float:
    """Expected tokens per step: 1 + a₁ + a₁a₂ + … for conditional acceptance rates a at each depth.
    The last rate stands for deeper ones.
    """
    total = reached = 1.0
    for rate in [*rates, *[rates[-1]] * (length - len(rates))][:length]:
        reached *= rate
        total += reached
    return total


def convex_slopes(seconds: Sequence[float]) -> np.ndarray:
    """Price of each further row under the largest convex curve below ``seconds`` [n + 1], of 1 to n
    + 1 rows → [n].

    Verification costs rise in steps (tiles of rows): within a tile further rows are free once its
    first row is paid for. The convex hull spreads a step's cost over its rows, so that adding rows
    one by one finds the best number.
    """
    values = np.maximum.accumulate(np.asarray(seconds, dtype=np.float64))
    slopes = np.empty(len(values) - 1)
    begin = 0
    while begin < len(slopes):
        steps = (values[begin + 1 :] - values[begin]) / np.arange(1, len(values) - begin)
        end = begin + 1 + int(steps.argmin())
        slopes[begin:end] = steps.min()
        begin = end
    return slopes
