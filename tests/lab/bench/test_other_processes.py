"""How busy other processes kept the machine, with readings that are made up."""

from __future__ import annotations

import pytest

from multirate.lab.bench import other_processes
from multirate.lab.bench.other_processes import OtherProcesses


@pytest.mark.parametrize(
    "machine, own, expected",
    [
        (20.0, 20.0, 0.0),  # all of it is ours
        (25.0, 20.0, 0.5),
        (19.9, 20.0, 0.0),  # clocks that are read one after the other
        (20.0, 0.0, 2.0),
    ],
)
def test_processors_that_others_used(
    monkeypatch: pytest.MonkeyPatch, machine: float, own: float, expected: float
) -> None:
    readings = iter([(100.0, 7.0, 3.0), (110.0, 7.0 + machine, 3.0 + own)])
    monkeypatch.setattr(other_processes, "_seconds", lambda: next(readings))
    assert OtherProcesses().processors() == pytest.approx(expected)


def test_this_process_is_not_another() -> None:
    before = other_processes._seconds()
    while other_processes._seconds()[2] < before[2] + 0.2:
        sum(range(10_000))
    now = other_processes._seconds()
    # the machine's clock counts ticks of 10 ms, and may miss some of them
    assert now[1] - before[1] > 0.1
