"""Reading ahead stays on where it makes passes faster, goes off where it does not, and is tried
again.
"""

from __future__ import annotations

import torch

from multirate.experts.controller import AdaptivePredictor
from multirate.experts.loader import Prediction
from multirate.experts.predictors import PreviousToken


class Machine:
    """A clock that a pass moves by `on` or `off` seconds, by whether anything was predicted in
    it.
    """

    def __init__(self, on: float, off: float) -> None:
        self.on, self.off, self.now = on, off, 0.0
        inner = PreviousToken(3)
        self.controller = AdaptivePredictor(
            {"previous_token": inner}, block=4, turns=3, stay=50, clock=lambda: self.now
        )
        self.passes: list[bool] = []

    def run(self, count: int, rows: int = 1) -> None:
        for _ in range(count):
            found: list[Prediction] = []
            self.controller.began(rows)
            for row in range(3):
                self.controller.used(row, [1, 2])
                found += self.controller.predict(row, torch.zeros(rows, 4))
            self.passes.append(bool(found))
            self.now += (self.on if found else self.off) * (100 if rows > 1 else 1)


def test_it_stays_on_where_it_pays_and_goes_off_where_not() -> None:
    for on, off in ((1.0, 1.5), (1.5, 1.0)):
        machine = Machine(on, off)
        machine.run(40)
        decided = machine.passes[-1]
        assert decided == (on < off)
        assert ("is not faster" in machine.controller.verdict) == (on > off)
        machine.run(15)
        assert machine.passes[-15:] == [decided] * 15


def test_a_gain_within_the_noise_is_none() -> None:
    machine = Machine(0.99, 1.0)
    machine.run(40)
    assert not machine.passes[-1]


def test_prompts_do_not_count() -> None:
    machine = Machine(1.0, 1.5)
    for _ in range(30):
        machine.run(2)
        machine.run(1, rows=9)
    assert machine.controller.on
    times = [seconds for turn in machine.controller._times for seconds in turn.values()]
    assert times and max(times) < 2


def test_a_machine_that_changes_is_noticed() -> None:
    machine = Machine(1.5, 1.0)
    machine.run(40)
    assert not machine.controller.on
    machine.on, machine.off = 1.0, 1.5
    machine.run(130)
    assert machine.passes[-1]
    assert (
        AdaptivePredictor({"previous_token": PreviousToken(2)}).verdict
        == "prefetching has not been measured yet"
    )


def test_the_fastest_of_several_names() -> None:
    class Named(PreviousToken):
        most_depth = 2

        def predict(self, row: int, residual: torch.Tensor) -> list[Prediction]:
            return [Prediction((row, self.number), row, 1.0)]

        def __init__(self, number: int) -> None:
            super().__init__(3)
            self.number = number

    for seconds, best in (([1.2, 1.0, 1.5], 1), ([1.0, 1.2, 1.5], 0), ([2.0, 2.2, 1.0], None)):
        now = 0.0
        names = {"first": Named(0), "second": Named(1)}
        chooser = AdaptivePredictor(names, block=4, turns=3, stay=200, clock=lambda: now)  # noqa: B023
        asked: list[int | None] = []
        for _ in range(90):
            chooser.began(1)
            chooser.depth = 1 + chooser.candidate
            found = chooser.predict(0, torch.zeros(1, 4))
            asked.append(found[0].key[1] if found else None)
            now += seconds[2] if asked[-1] is None else seconds[asked[-1]]
        assert set(asked[:30]) == {0, 1, None} and set(asked[-20:]) == {best}
        assert [one.depth for one in names.values()] == [1, 2]
        assert ("second" in chooser.verdict) == (best == 1) and (
            "is not faster" in chooser.verdict
        ) == (best is None)
