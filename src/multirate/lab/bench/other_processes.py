"""How busy other processes kept the machine while something was measured."""

from __future__ import annotations

import time

import psutil

NOTABLE = 0.2
"""Processors: what others use below this does not change a comparison."""


class OtherProcesses:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._before = _seconds()

    def processors(self) -> float:
        """How many processors all other processes have kept busy since, on average. Processes that
        this one started are not among them.
        """
        wall, busy, own = (
            now - before for now, before in zip(_seconds(), self._before, strict=True)
        )
        return max(0.0, (busy - own) / wall) if wall > 0 else 0.0


def _seconds() -> tuple[float, float, float]:
    """The time; processor seconds of the whole machine; those of this process and its children."""
    machine = psutil.cpu_times()
    busy = sum(machine) - machine.idle - getattr(machine, "iowait", 0.0)
    busy -= getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)  # in user, nice
    this = psutil.Process()
    times = [this.cpu_times()]
    for child in this.children(recursive=True):
        try:
            times.append(child.cpu_times())
        except psutil.Error:  # it has just ended
            continue
    own = sum(one.user + one.system + one.children_user + one.children_system for one in times)
    return time.monotonic(), busy, own
