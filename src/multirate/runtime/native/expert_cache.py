"""The kernel's enumerations for passes over experts that are not all in memory (csrc/moe), in its
order.
"""

from __future__ import annotations

EVICTIONS = ("none", "lru", "lrfu", "least_stale", "belady")
PREDICTORS = (
    "none",
    "previous_token",
    "popularity",
    "next_layer_gate",
    "accelerated",
    "oracle",
    "stream",
)
EVENTS = ("compute", "demand", "speculative", "stall", "predict", "token")
MOST_AHEAD, MOST_PREDICTORS = 8, 4

DONE, READ_FAILED, PAUSED = 0, 1, 2
