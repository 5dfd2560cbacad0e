"""Where seconds of a generation go."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class TimeSplit:
    """Seconds of a generation, by what they were spent on."""

    draft: float = 0.0
    """Drafting, and what only drafts need."""
    own: float = 0.0
    """The model's layers, in verification and plain passes."""
    head: float = 0.0
    """The model's head, and the choice of tokens."""

    def __add__(self, other: TimeSplit) -> TimeSplit:
        return TimeSplit(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: TimeSplit) -> TimeSplit:
        return TimeSplit(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))
