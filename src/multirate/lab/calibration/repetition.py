"""How much of an answer only repeats the text right before it. [ours]

A model that repeats "and, and, and" agrees with the full model, which would continue the same way,
and its drafts are always right. Quality and speed of such an answer mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MOST_LOOPING = 0.05
"""How much larger the share of looping tokens may be in lossy answers than in the model's own.
Above it, the measured quality means nothing.
"""
LONGEST_PERIOD = 16
COPIES = 3
"""Of the same tokens side by side, from which on they are a loop: a list's or a table's two alike
lines are none."""


def in_loops(tokens: Sequence[int]) -> np.ndarray:
    """bool [n]: the tokens that belong to the third or a later copy of the text right before
    them.
    """
    x = np.asarray(tokens)
    found = np.zeros(len(x), bool)
    for period in range(1, min(LONGEST_PERIOD, len(x) // COPIES) + 1):
        same, run = x[period:] == x[:-period], 0
        for place, equal in enumerate(same.tolist(), start=period):
            run = run + 1 if equal else 0
            if run > (COPIES - 2) * period:
                found[place] = True
    return found


def share_in_loops(answers: Sequence[Sequence[int]]) -> float:
    """Of all the answers' tokens; 0 where there are none."""
    return sum(int(in_loops(one).sum()) for one in answers) / max(1, sum(map(len, answers)))
