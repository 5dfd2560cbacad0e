"""Which predictions are read: how often those of the same rank were right lately, for
experts that were absent.

A read that is not needed is not free even on an idle disk: it takes a processor from computing, and
a slot. Of the experts predicted last among a layer's k, half come true where nine in ten of the
first do.
"""

from __future__ import annotations

from collections.abc import Sequence

from multirate.experts.expert_cache import Key

_DECAY = 0.99
_PRIOR = (2.0, 2.0)  # right and all: a rank that nothing is known of is trusted


class PrefetchFilter:
    """least: the share that must come true. Ranks are told apart by (depth, chance)."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._counts: dict[tuple[int, int], tuple[float, float]] = {}
        self._open: dict[Key, tuple[int, int]] = {}  # predicted and absent: of which rank

    def keep(self, key: Key, depth: int, chance: float) -> bool:
        """Whether an absent expert is to be read ahead. Its coming true counts either way."""
        rank = self._open[key] = depth, round(100 * chance)
        right, every = self._counts.get(rank, _PRIOR)
        return right >= self._least * every

    def outcome(self, row: int, needed: Sequence[int]) -> None:
        """Layer `row` needs these."""
        came = set(needed)
        for key in [key for key in self._open if key[0] == row]:
            rank = self._open.pop(key)
            right, every = self._counts.get(rank, _PRIOR)
            self._counts[rank] = right * _DECAY + (key[1] in came), every * _DECAY + 1

    def new_pass(self) -> None:
        """What was predicted for the last pass stays open no longer."""
        self._open.clear()
