"""What loading did: counts and bytes by origin, waiting, and (when asked for) every event for the
timeline.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any


@dataclass
class Event:
    """What happened between two moments (perf_counter). kind: compute, demand, speculative, stall,
    predict or token.
    """

    kind: str
    begin: float
    end: float
    row: int
    expert: int = -1


@dataclass
class ExpertStats:
    """Counts since the last reset.

    uses: (token row, layer, expert) needs, each expert once per layer call. hits: it was READY
    without a demand read; of these `timely` were loaded ahead of time and used for the first time.
    misses: a demand read, or a wait for a speculative one under way (`late`). wasted: loaded ahead
    of time and evicted unused. issued, cancelled: reads ahead of time.
    stall_seconds: compute waited for reads. predictor_seconds: spent predicting. read_seconds:
    something was being read.
    """

    calls: int = 0
    uses: int = 0
    hits: int = 0
    timely: int = 0
    late: int = 0
    wasted: int = 0
    issued: int = 0
    cancelled: int = 0
    demand_bytes: int = 0
    speculative_bytes: int = 0
    stall_seconds: float = 0.0
    predictor_seconds: float = 0.0
    read_seconds: float = 0.0
    errors: int = 0
    events: list[Event] | None = field(default=None, repr=False)

    @property
    def misses(self) -> int:
        """Needs that had to wait for a read."""
        return self.uses - self.hits

    @property
    def hit_rate(self) -> float:
        """Share of needs found READY and not brought by speculation: the cache's own work."""
        return (self.hits - self.timely) / self.uses if self.uses else 0.0

    @property
    def recall(self) -> float:
        """Share of would-be misses whose load had been issued ahead of time, in time or not."""
        needed = self.timely + self.misses
        return (self.timely + self.late) / needed if needed else 0.0

    @property
    def precision(self) -> float:
        """Share of speculative loads begun that were needed before they were evicted."""
        begun = self.issued - self.cancelled
        if begun <= 0:
            return 0.0
        return min(
            1.0, (self.timely + self.late) / begun
        )  # what a phase needed may have been begun before it

    @property
    def bytes(self) -> int:
        """Bytes read."""
        return self.demand_bytes + self.speculative_bytes

    def note(self, kind: str, begin: float, row: int, expert: int = -1) -> None:
        """Records an event that ends now, if events are recorded."""
        if self.events is not None:
            self.record(kind, begin, time.perf_counter(), row, expert)

    def record(self, kind: str, begin: float, end: float, row: int, expert: int = -1) -> None:
        """Records an event, if events are recorded."""
        if self.events is not None:
            self.events.append(Event(kind, begin, end, row, expert))

    def copy(self) -> ExpertStats:
        """The counts as they are now, without events."""
        return replace(self, events=None)

    def minus(self, before: ExpertStats) -> ExpertStats:
        """What was counted since `before`, a copy of these."""
        return ExpertStats(
            **{name: getattr(self, name) - getattr(before, name) for name in _COUNTS}
        )

    def add(self, other: ExpertStats) -> None:
        """Counts the other's too."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def as_dict(self) -> dict[str, Any]:
        """Counts and rates, JSON-ready."""
        content = {k: v for k, v in asdict(self).items() if k != "events"}
        return {
            **content,
            "hit_rate": self.hit_rate,
            "recall": self.recall,
            "precision": self.precision,
        }


_COUNTS = tuple(f.name for f in fields(ExpertStats) if f.name != "events")
