"""How far to draft: as far as a node's chance of being accepted pays for its time on this machine.
[ours]

A node verified with probability r of being reached adds r tokens and costs c seconds. It raises
tokens per second exactly when r / c exceeds the present rate, so the least path probability worth a
node is c / v with v the present seconds per token, measured as decoding goes on. A row's cost c
depends on how many there are already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

_MEMORY = 0.95  # of the running rate: about the last twenty steps
_LEAST, _MOST = 0.02, 0.9
_CHANGE = 0.05  # of the rate, below which thresholds stay as they are


@dataclass(frozen=True)
class StepCosts:
    """Measured seconds of the pieces of a speculative step.

    plain_step: one plain decoding step. verify: rows → seconds of verifying that many rows (layers
    [start, L), head).
    draft_step: one more drafted level. draft_fixed: drafting's cost per step that does not depend
    on its length.
    """

    plain_step: float
    verify: Mapping[int, float]
    draft_step: float
    draft_fixed: float = 0.0

    def verify_seconds(self, rows: int) -> float:
        """Seconds of verifying `rows` rows: linear between the measured counts, and beyond them by
        the last slope.
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
        `sequences`.

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
    """Tokens a step emits on average: 1 + a₁ + a₁a₂ + … for conditional acceptance rates a of each
    depth.
    """
    total = reached = 1.0
    for rate in rates[:length]:
        reached *= rate
        total += reached
    return total


@dataclass
class DraftLengthController:
    """Seconds of one more draft level and of the n-th drafted row [nodes], and the running seconds
    per token.

    clock: seconds that pass; another one than the machine's for simulations.
    """

    level: float
    rows: np.ndarray
    _seconds: float
    _tokens: float = 1.0
    clock: Callable[[], float] = time.perf_counter
    _last: float | None = field(default=None, repr=False)
    _priced_at: tuple[int, float] = (0, 1.0)
    _thresholds: tuple[np.ndarray, np.ndarray] | None = field(default=None, repr=False)

    @staticmethod
    def of(costs: StepCosts, nodes: int = 8) -> DraftLengthController:
        """For drafts of up to ``nodes`` nodes."""
        seconds = [costs.verify_seconds(1 + n) for n in range(nodes + 1)]
        # before the first steps: as if speculation halved the time of a token
        return DraftLengthController(costs.draft_step, convex_slopes(seconds), costs.plain_step / 2)

    def pause(self) -> None:
        """Time until the next step is not a step's (another generation begins)."""
        self._last = None

    def emitted(self, tokens: int) -> None:
        """A sequence's step emitted so many tokens."""
        self._tokens += tokens

    def thresholds(self, sequences: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """(draft_threshold, verify_threshold), [nodes] each, for the next step, in which a level
        serves `sequences` sequences. Called once per step.
        """
        now = self.clock()
        if self._last is not None:
            self._seconds += now - self._last
            self._seconds *= _MEMORY
            self._tokens *= _MEMORY
        self._last = now
        per_token = sequences, self._seconds / max(self._tokens, 1e-3)
        before = self._priced_at
        if (
            self._thresholds is None
            or before[0] != sequences
            or abs(per_token[1] / before[1] - 1) > _CHANGE
        ):
            verify_threshold = self.rows / per_token[1]
            draft_threshold = verify_threshold + self.level / sequences / per_token[1]
            self._thresholds = (
                draft_threshold.clip(_LEAST, _MOST),
                verify_threshold.clip(_LEAST, _MOST),
            )
            self._priced_at = per_token
        return self._thresholds


def convex_slopes(seconds: Sequence[float]) -> np.ndarray:
    """Price of each further row under the largest convex curve below ``seconds`` [n + 1], of 1 to n
    + 1 rows → [n].

    Verification costs rise in steps (tiles of rows): inside a step a row is free, yet who pays for
    its first row may use the rest. The hull shares a step's cost among its rows, so that adding
    rows one by one finds the best number.
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
