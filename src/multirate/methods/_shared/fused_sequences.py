"""The fused steps of several sequences: which are whose, and which are free for another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from multirate.methods._shared.fused_steps import FusedSteps


class FusedSequences:
    """The fused steps of a generation's sequences. ``make`` gives those of one: called when it is
    needed, and kept for later generations.
    """

    def __init__(self, make: Callable[[], FusedSteps]) -> None:
        self._make = make
        self._free: list[FusedSteps] = []
        self._entered: dict[int, FusedSteps] = {}
        self._begin: Callable[[FusedSteps], None] = lambda steps: None

    @property
    def any_of_them(self) -> FusedSteps:
        """Those of no sequence yet."""
        if not self._free:
            self._free.append(self._make())
        return self._free[-1]

    def begin(self, begin: Callable[[FusedSteps], None]) -> None:
        """A generation begins, and with `begin` the steps of each of its sequences."""
        self._free += self._entered.values()
        self._entered, self._begin = {}, begin

    def start(self, seq: int) -> FusedSteps:
        """Those of a sequence from now on, which enters them next."""
        steps = self._free.pop() if self._free else self._make()
        self._begin(steps)
        self._entered[seq] = steps
        return steps

    def __contains__(self, seq: int) -> bool:
        return seq in self._entered

    def __getitem__(self, seq: int) -> FusedSteps:
        """Those of a sequence that has been started."""
        return self._entered[seq]

    @property
    def refused(self) -> float:
        """The highest `FusedSteps.refused` of all."""
        return max((steps.refused for steps in self._entered.values()), default=-np.inf)
