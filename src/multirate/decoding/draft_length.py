"""How far to draft: as far as a node's chance of being accepted pays for its time on this machine. [ours]"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_CONFIDENCE_BINS = 10


@dataclass(frozen=True)
class RoundCosts:
    """Measured seconds of the pieces of a round.

    plain_step: one plain decoding step. verify: rows → seconds of verifying that many rows (layers [start, L), head).
    draft_step: one more drafted level. draft_fixed: drafting's cost per round that does not depend on its length.
    """

    plain_step: float
    verify: Mapping[int, float]
    draft_step: float
    draft_fixed: float = 0.0

    def verify_seconds(self, rows: int) -> float:
        """Seconds of verifying `rows` rows: linear between the measured counts, and beyond them by the last slope."""
        known = sorted(self.verify)
        if rows <= known[0] or len(known) == 1:
            return self.verify[known[0]]
        upper = next((i for i, count in enumerate(known) if count >= rows), len(known) - 1)
        left, right = known[upper - 1], known[upper]
        slope = (self.verify[right] - self.verify[left]) / (right - left)
        return self.verify[left] + max(slope, 0.0) * (rows - left)

    def round_seconds(self, length: int, sequences: int = 1) -> float:
        """Seconds of a round with chains of `length` drafted tokens in each of `sequences`; length 0: a plain step."""
        if length == 0:
            return self.plain_step
        return self.draft_fixed + length * self.draft_step + self.verify_seconds(sequences * (length + 1))


def expected_tokens(rates: Sequence[float], length: int) -> float:
    """Tokens a round emits on average: 1 + a₁ + a₁a₂ + … for conditional acceptance rates a of each depth."""
    total = reached = 1.0
    for rate in rates[:length]:
        reached *= rate
        total += reached
    return total


def best_length(costs: RoundCosts, rates: Sequence[float], longest: int, sequences: int = 1) -> tuple[int, float]:
    """(length, tokens per second and sequence) with the highest expected throughput among lengths 0..longest."""
    options = range(min(longest, len(rates)) + 1)
    speeds = [expected_tokens(rates, n) / costs.round_seconds(n, sequences) for n in options]
    length = max(options, key=speeds.__getitem__)
    return length, speeds[length]


class AcceptanceEstimate:
    """Running estimate, per depth, of the chance that a node is accepted given that its parent was.

    Counts decay, so the estimate follows the text (about the last 1 / (1 − decay) rounds); a prior of `strength`
    pseudo-observations at rate `prior` keeps it sane while counts are few.
    """

    def __init__(self, depth: int, prior: float = 0.7, strength: float = 4.0, decay: float = 0.98) -> None:
        self._prior, self._strength, self._decay = prior, strength, decay
        self._tried = [0.0] * depth
        self._hits = [0.0] * depth

    def observe(self, levels: int, accepted: int) -> None:
        """A draft of `levels` levels had its first `accepted` accepted; what lies below a rejection was not tried."""
        for i in range(min(levels, accepted + 1, len(self._tried))):
            self._tried[i] = self._tried[i] * self._decay + 1
            self._hits[i] = self._hits[i] * self._decay + (i < accepted)

    def rates(self) -> list[float]:
        """Conditional acceptance rates of depths 1, 2, … A depth seen little leans on the one above it."""
        rates, lean = [], self._prior
        for tried, hits in zip(self._tried, self._hits, strict=True):
            lean = (hits + self._strength * lean) / (tried + self._strength)
            rates.append(lean)
        return rates


class DraftLengthController:
    """Chooses how far to draft, from measured costs and what has been accepted lately.

    By renewal–reward, a rule that maximises long-run tokens per second adds a node iff its expected gain (the chance
    that it and all above it are accepted) exceeds its marginal cost times the throughput λ of the best rule.
    """

    def __init__(self, costs: RoundCosts, longest: int, prior: float = 0.7, probe_every: int = 32) -> None:
        self.costs = costs
        self.longest = longest
        self.acceptance = AcceptanceEstimate(longest, prior)
        self._bins = [[0.0, 0.0] for _ in range(_CONFIDENCE_BINS)]  # decayed [tried, accepted] per confidence
        self._probe_every = probe_every
        self._idle_rounds = 0

    def length(self, limit: int, sequences: int = 1) -> int:
        """How many levels to draft in the next round, at most `limit`; 0: a plain step is faster.

        After `probe_every` rounds of 0 it asks for one level, so that the estimate can recover.
        """
        length, _ = best_length(self.costs, self.acceptance.rates(), min(limit, self.longest), sequences)
        self._idle_rounds = 0 if length else self._idle_rounds + 1
        if self._idle_rounds >= self._probe_every:
            self._idle_rounds = 0
            return min(1, limit)
        return length

    def worth_node(self, depth: int, reached: float, sequences: int = 1) -> bool:
        """Whether a node at `depth` ≥ 1 pays, if it and all above it are accepted with probability `reached`."""
        if depth > self.longest:
            return False
        _, throughput = best_length(self.costs, self.acceptance.rates(), self.longest, sequences)
        more_rows = self.costs.verify_seconds(sequences * (depth + 1)) - self.costs.verify_seconds(sequences * depth)
        return reached >= throughput * (self.costs.draft_step + more_rows)

    def calibrated(self, confidence: float) -> float:
        """A drafter's confidence in its token (0..1) → the rate at which such tokens were accepted lately."""
        tried, accepted = self._bins[_bin(confidence)]
        strength = 4.0
        return (accepted + strength * confidence) / (tried + strength)

    def observe(self, levels: int, accepted: int, confidences: Sequence[float] = ()) -> None:
        """One sequence's round: `levels` drafted, the first `accepted` accepted, with the drafter's confidences."""
        self.acceptance.observe(levels, accepted)
        for i, confidence in enumerate(confidences[: min(levels, accepted + 1)]):
            counts = self._bins[_bin(confidence)]
            counts[0] = counts[0] * 0.98 + 1
            counts[1] = counts[1] * 0.98 + (i < accepted)


def _bin(confidence: float) -> int:
    return min(int(confidence * _CONFIDENCE_BINS), _CONFIDENCE_BINS - 1)
