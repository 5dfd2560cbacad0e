"""When a node of a draft tree pays: its reach against its cost, both in time on this machine. [ours]

A node verified with probability r of being reached adds r tokens and costs c seconds. It raises tokens per second
exactly when r / c exceeds the present rate, so the least reach worth a node is c / v with v the present seconds per
token, measured as decoding goes on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from multirate.decoding.draft_length import RoundCosts

_MEMORY = 0.95  # of the running rate: about the last twenty rounds
_LEAST, _MOST = 0.02, 0.9


@dataclass
class Prices:
    """Seconds of one more draft level and one more verified row, and the running seconds per token."""

    level: float
    row: float
    _seconds: float
    _tokens: float = 1.0
    _last: float | None = field(default=None, repr=False)

    @staticmethod
    def of(costs: RoundCosts, rows: int = 8) -> Prices:
        """rows: most rows of a verification."""
        slope = (costs.verify_seconds(rows) - costs.verify_seconds(1)) / max(1, rows - 1)
        # before the first rounds: as if speculation halved the time of a token
        return Prices(costs.draft_step, max(slope, 0.0), costs.plain_step / 2)

    def pause(self) -> None:
        """Time until the next round is not a round's (another generation begins)."""
        self._last = None

    def emitted(self, tokens: int) -> None:
        """A sequence's round emitted so many tokens."""
        self._tokens += tokens

    def thresholds(self, sequences: int = 1) -> tuple[float, float]:
        """(expand, keep) for the next round, in which a level serves `sequences` sequences. Called once per round."""
        now = time.perf_counter()
        if self._last is not None:
            self._seconds += now - self._last
            self._seconds *= _MEMORY
            self._tokens *= _MEMORY
        self._last = now
        per_token = self._seconds / max(self._tokens, 1e-3)
        keep = self.row / per_token
        expand = (self.level / sequences + self.row) / per_token
        return min(max(expand, _LEAST), _MOST), min(max(keep, _LEAST), _MOST)
