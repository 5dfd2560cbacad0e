"""Where seconds of a generation go."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class TimeSplit:
    """Seconds by what they were spent on.

    draft: making drafts, and what only they need. narrow, own: layers of passes that verify or are
    plain ones, of a narrow copy and of the model's own weights. head: the heads of both, and the
    choice of tokens.
    """

    draft: float = 0.0
    narrow: float = 0.0
    own: float = 0.0
    head: float = 0.0

    def __add__(self, other: TimeSplit) -> TimeSplit:
        return TimeSplit(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: TimeSplit) -> TimeSplit:
        return TimeSplit(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))
