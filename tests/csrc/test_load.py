"""Threads that other programs keep from running are done without (load.c); calls are made up."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multirate.model.native import abi, library


@pytest.fixture(autouse=True)
def variant() -> str:
    """Instead of this folder's fixture: there are no products in it."""
    return "native"


@dataclass
class Machine:
    """Calls one after the other on `wanted` threads."""

    wanted: int
    now: float = 100.0
    load: Any = field(default_factory=lambda: abi.ffi.new("Load *"))

    @property
    def threads(self) -> int:
        return int(library.kernel().mr_threads_under_load(self.load, self.wanted, self.now))

    def call(self, seconds: float, *lost: float) -> int:
        """A call of so long, in which its threads did not run for these shares → its threads."""
        used = self.threads
        self.now += seconds
        parts = [seconds * share for share in (*lost, *[0.0] * self.wanted)[:used]]
        library.kernel().mr_note_call(self.load, used, self.now, seconds, parts)
        return used


def test_threads_that_run_are_all_used() -> None:
    machine = Machine(2)
    assert {machine.call(0.007, 0.1, 0.5) for _ in range(1000)} == {2}


def test_one_thread_is_used_where_two_wait_for_each_other() -> None:
    machine = Machine(2)
    used = [machine.call(0.01, 0.9, 0.9) for _ in range(4)]
    assert used == [2, 2, 2, 1]


def test_only_threads_that_lose_are_done_without() -> None:
    machine = Machine(8)
    machine.call(0.05, 0.0, 0.9, 0.2, 0.0, 0.8, 0.0, 0.0, 0.0)
    assert machine.threads == 6


def test_they_are_tried_again_ever_more_seldom() -> None:
    machine, tried = Machine(2), []
    while machine.now < 130:
        if machine.call(0.05, 0.9, 0.9) == 2:
            tried.append(machine.now)
    pauses = [b - a for a, b in pairwise(tried)]
    assert pauses[:7] == pytest.approx([0.25, 0.5, 1, 2, 4, 4, 4], abs=0.11)


def test_when_the_other_programs_end_all_are_used_again_and_pauses_forgotten() -> None:
    machine = Machine(2)
    for _ in range(100):
        machine.call(0.05, 0.9, 0.9)
    begin = machine.now
    while machine.call(0.05) == 1:
        assert machine.now < begin + 4.2
    assert {machine.call(0.05) for _ in range(50)} == {2}
    machine.call(0.05, 0.9, 0.9)
    assert machine.threads == 1
    machine.now += 0.3  # the first pause again
    assert machine.threads == 2


@given(
    st.integers(1, 64),
    st.lists(st.tuples(st.floats(1e-5, 0.2), st.lists(st.floats(0, 1), max_size=64)), max_size=60),
)
def test_there_is_always_one_and_never_more_than_wanted(
    wanted: int, calls: list[tuple[float, list[float]]]
) -> None:
    machine, seen = Machine(wanted), 0.0
    for seconds, lost in calls:
        used = machine.call(seconds, *lost)
        assert 1 <= used <= wanted
        assert used == wanted or seen >= 0.03
        seen += seconds
