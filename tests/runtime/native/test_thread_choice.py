"""How many threads a call uses (thread_choice.c), on simulated machines: no clock is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from multirate.runtime.native import library

LAYERS, HEAD, DRAFT = 11, 12, 13
STEP = {LAYERS: 1.0, HEAD: 0.2, DRAFT: 0.1}
"""The calls of a decoding step, and their shares of its time."""


@dataclass
class Machine:
    """seconds: of a step, by threads. noise: standard deviation of the logarithm of a call's time.
    stalls: how often a step waits for a thread that another process keeps from running, by threads,
    and for how long.
    """

    seconds: Sequence[float]
    noise: float = 0.05
    stalls: Callable[[int], tuple[float, float]] = lambda threads: (0.0, 0.0)

    def call(self, kind: int, threads: int, draw: np.random.Generator) -> float:
        often, long = self.stalls(threads)
        took = self.seconds[threads - 1] * STEP[kind] * float(draw.lognormal(0.0, self.noise))
        waits = draw.random() < often * STEP[kind]
        return took + (long * float(draw.exponential()) if waits else 0.0)


IDLE = Machine([0.0060, 0.0040])
ONE_BUSY = Machine(
    [0.0062, 0.0045], stalls=lambda threads: (0.0, 0.0) if threads == 1 else (0.7, 0.012)
)
TWO_BUSY = Machine(
    [0.0065, 0.0050], 0.1, stalls=lambda threads: (0.25, 0.008) if threads == 1 else (0.35, 0.012)
)
FOUR_BUSY = Machine(
    [0.0065, 0.0050], 0.2, stalls=lambda threads: (0.5, 0.02) if threads == 1 else (0.6, 0.08)
)
IDLE_8 = Machine([0.008 / n + 0.0004 * n**0.5 for n in range(1, 9)])


def tokens_in(
    machine: Machine, seconds: float, seed: int, workspace: library.Workspace, began: float
) -> tuple[int, float]:
    """How many steps a workspace makes on a machine from `began` on, and when it is done."""
    draw, now, steps = np.random.default_rng(seed), began, 0
    kernel = library.kernel()
    while now < began + seconds:
        for kind in STEP:
            took = machine.call(kind, kernel.mr_next_threads(workspace.address, kind), draw)
            now += took
            kernel.mr_note_call(workspace.address, kind, took, now)
        steps += 1
    return steps, now


def share_of_best(phases: Sequence[tuple[Machine, float]], seed: int) -> list[float]:
    """What the choice reaches of the best fixed number of threads, in each phase."""
    most = len(phases[0][0].seconds)
    workspace, now, shares = library.Workspace(most), 100.0, []
    for machine, seconds in phases:
        steps, now = tokens_in(machine, seconds, seed, workspace, now)
        fixed = []
        for threads in range(1, most + 1):
            alone = library.Workspace(threads)
            alone.set_threads(threads, fixed=True)
            fixed.append(tokens_in(machine, seconds, seed, alone, now)[0])
        shares.append(steps / max(fixed))
    return shares


@pytest.mark.parametrize(
    "machine, least",
    [(IDLE, 0.97), (ONE_BUSY, 0.88), (TWO_BUSY, 0.88), (FOUR_BUSY, 0.6), (IDLE_8, 0.97)],
    ids=["idle", "one busy", "two busy", "four busy", "idle, 8"],
)
def test_nearly_as_fast_as_the_best_number_of_threads(machine: Machine, least: float) -> None:
    shares = [share_of_best([(machine, 5.0)], seed)[0] for seed in range(5)]
    assert float(np.mean(shares)) >= least, shares


def test_a_change_of_the_machine_is_noticed() -> None:
    phases = [(IDLE, 5.0), (ONE_BUSY, 5.0), (IDLE, 5.0)]
    shares = np.mean([share_of_best(phases, seed) for seed in range(5)], axis=0)
    assert (shares >= 0.85).all(), shares


def test_a_fixed_number_stays() -> None:
    workspace = library.Workspace(2)
    workspace.set_threads(2, fixed=True)
    tokens_in(ONE_BUSY, 2.0, 0, workspace, 100.0)
    assert workspace.threads == 2


def test_one_thread_is_the_least() -> None:
    workspace = library.Workspace(1)
    tokens_in(Machine([0.004]), 2.0, 0, workspace, 100.0)
    assert workspace.threads == 1


def test_a_trial_takes_no_calls_of_unknown_kinds() -> None:
    workspace, draw, now = library.Workspace(2), np.random.default_rng(0), 100.0
    kernel, address, trials = library.kernel(), workspace.address, 0
    for unknown in range(1000, 6000):
        for kind in STEP:
            took = IDLE.call(kind, kernel.mr_next_threads(address, kind), draw)
            now += took
            kernel.mr_note_call(address, kind, took, now)
        trials += kernel.mr_next_threads(address, LAYERS) != workspace.threads
        assert kernel.mr_next_threads(address, unknown) == workspace.threads
    assert trials > 10


def test_the_more_frequent_of_two_kinds_in_one_place_is_known() -> None:
    def place(kind: int) -> int:  # usual_time in thread_choice.c
        return (kind * 0x9E3779B97F4A7C15 % 2**64) >> 58

    rare = next(kind for kind in range(1000, 9000) if place(kind) == place(LAYERS))
    workspace, draw, now = library.Workspace(2), np.random.default_rng(0), 100.0
    kernel, address = library.kernel(), workspace.address
    slow = Machine([0.004, 0.008])
    for _ in range(400):
        for kind in (LAYERS, LAYERS, LAYERS, rare):
            threads = kernel.mr_next_threads(address, kind)
            took = slow.call(LAYERS, threads, draw)
            now += took
            kernel.mr_note_call(address, kind, took, now)
    assert workspace.threads == 1
