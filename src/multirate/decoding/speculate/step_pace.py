"""How long steps take, compared with what the measured costs say: of one sequence, and of several.
[ours]

A machine gets slower and faster, contexts grow, and other work runs beside the decoder.
"""

from __future__ import annotations

from typing import Protocol

_MEMORY = 0.95  # measured over expected seconds: about the last 20 steps
_USUAL_MEMORY = 0.99  # the usual ratio between the two kinds of step
_LEVEL_MEMORY = 0.9  # a step's time without a draft's rows: about the last 10
_NEIGHBOURS_MEMORY = 0.99  # what rows take: about the last 100

# First guesses, and how many measured steps each guess weighs as much as.
_STEPS = 4.0  # step times are what the costs say
_USUAL_STEPS = 20.0  # both kinds of step deviate from the costs alike
_ROW_STEPS, _ROW_SHARE = 4.0, 0.05  # rows take what the costs say: steps in which they take this
# share of a plain step's time

# Limits, so that one bad measurement cannot decide for long.
_SLOWEST = 0.3, 6.0  # measured over expected seconds of a step
_ROW_RANGE = 0.03, 20.0  # the same of the rows that a draft adds
_LEAST_OWN = 0.4  # pace of steps with own drafts over that of steps without (the costs may have
# been measured while another program ran)


class StepPace(Protocol):
    """plain: measured over expected seconds of a plain step. row: of a row that a draft adds.
    drafting: of own drafts; the policy also measures these by themselves. plain_steps: how many
    plain steps were observed.
    """

    plain: float
    row: float
    plain_steps: int

    @property
    def drafting(self) -> float: ...

    def observe(
        self,
        seconds: float,
        plain: float,
        rows: float,
        drafting: float | None,
        timed: float | None = None,
    ) -> None:
        """Records a step's seconds, and what the costs say: of a plain step, of its draft's rows,
        and of own drafts if it had any. timed: the seconds that these took.
        """

    def seconds(self, plain: float, rows: float, drafting: float | None) -> float:
        """Those of a step of which the costs say this."""


class SinglePace:
    """Of steps of one sequence: `plain` for steps without own drafts, `own` with them.

    A machine's speed may change while all steps are of one kind. The other kind's measurements
    therefore fade towards the usual ratio of both.

    plain: expected seconds of a plain step.
    """

    def __init__(self, plain: float) -> None:
        self._strength = _STEPS * plain  # the expected seconds that the first guess, 1, counts as
        # of steps without and with own drafts, each
        self._guess = [1.0, 1.0]
        self._seconds, self._expected = [0.0, 0.0], [0.0, 0.0]
        weight = _USUAL_STEPS * plain
        self._usual_seconds, self._usual_expected = [weight, weight], [weight, weight]
        self._neighbours = _NeighbouringSteps(plain, plain, 1.0)
        self._row_ratio = 1.0  # the pace of rows over that of plain steps
        self.plain = self.own = self.row = 1.0
        self.plain_steps = 0

    @property
    def drafting(self) -> float:
        return self.plain

    def observe(
        self,
        seconds: float,
        plain: float,
        rows: float,
        drafting: float | None,
        timed: float | None = None,
    ) -> None:
        if drafting is None or timed is not None:
            self._neighbours.observe(rows, seconds - (timed or 0.0))
            ratio = self._neighbours.of_rows * plain / self._neighbours.of_none
            self._row_ratio = _within(ratio, _ROW_RANGE)
        kind = int(drafting is not None)
        expected = plain + self._row_ratio * rows + (drafting or 0.0)
        self.plain_steps += not kind
        for i in (0, 1):
            self._expected[i] *= _MEMORY
            self._seconds[i] *= _MEMORY
        self._expected[kind] += expected
        self._seconds[kind] += seconds
        self._usual_expected[kind] = _USUAL_MEMORY * self._usual_expected[kind] + expected
        self._usual_seconds[kind] = _USUAL_MEMORY * self._usual_seconds[kind] + seconds
        usual = [self._usual_seconds[i] / self._usual_expected[i] for i in (0, 1)]
        now = self._estimate(kind)
        for i in (0, 1):  # towards what this kind takes now, times the ratio
            towards = now * usual[i] / usual[kind]
            self._guess[i] += (1 - _MEMORY) * (towards - self._guess[i])
        self.plain, self.own = (_within(self._estimate(i), _SLOWEST) for i in (0, 1))
        self.own = max(self.own, _LEAST_OWN * self.plain)
        self.row = self._row_ratio * self.plain

    def _estimate(self, kind: int) -> float:
        """The recent estimate for steps without (0) and with (1) own drafts."""
        seconds = self._seconds[kind] + self._strength * self._guess[kind]
        return seconds / (self._expected[kind] + self._strength)

    def seconds(self, plain: float, rows: float, drafting: float | None) -> float:
        pace = self.plain if drafting is None else self.own
        return pace * (plain + self._row_ratio * rows + (drafting or 0.0))


class BatchPace:
    """Of steps of several sequences, whose attention to long contexts and work outside the decoder
    add much to a step's time, but not to that of a row more.

    plain: expected seconds of a plain step. guess: the first guess of both paces.
    """

    def __init__(self, plain: float, guess: tuple[float, float]) -> None:
        self._of_plain, (self.plain, self.row) = plain, guess
        self._neighbours = _NeighbouringSteps(plain, plain * self.plain, self.row)
        self.plain_steps = 0

    @property
    def drafting(self) -> float:
        return 1.0

    def observe(
        self,
        seconds: float,
        plain: float,
        rows: float,
        drafting: float | None,
        timed: float | None = None,
    ) -> None:
        drafted = (drafting or 0.0) if timed is None else timed
        self.plain_steps += drafting is None and not rows
        self._neighbours.observe(rows, seconds - drafted)
        self.row = self._neighbours.of_rows
        self.plain = _within(self._neighbours.of_none / self._of_plain, _SLOWEST)

    def seconds(self, plain: float, rows: float, drafting: float | None) -> float:
        return self.plain * plain + self.row * rows + (drafting or 0.0)


class _NeighbouringSteps:
    """What a draft's rows take, by how the times of neighbouring steps differ.

    plain: seconds of a plain step, by the costs. of_none: of a step without rows, as measured.
    of_rows: measured over expected seconds of rows. Both begin with the values that are given.
    """

    def __init__(self, plain: float, of_none: float, of_rows: float) -> None:
        self.of_none, self.of_rows = of_none, of_rows
        self._least = _SLOWEST[0] * plain
        self._count, self._rows, self._seconds = 1.0, 0.0, of_none  # of the last steps
        # the first guess, which does not fade: of_rows comes back to it while no rows are drafted
        self._strength = _ROW_STEPS * (_ROW_SHARE * plain) ** 2
        self._guess = self._strength * of_rows
        # of how steps differ from those before: rows x rows, rows x seconds
        self._squares = self._products = 0.0

    def observe(self, rows: float, seconds: float) -> None:
        """Records a step's seconds, and those that the costs say its draft's rows take."""
        x, y = rows - self._rows / self._count, seconds - self._seconds / self._count
        self._squares = _NEIGHBOURS_MEMORY * self._squares + x * x
        self._products = _NEIGHBOURS_MEMORY * self._products + x * y
        self._count = _LEVEL_MEMORY * self._count + 1.0
        self._rows = _LEVEL_MEMORY * self._rows + rows
        self._seconds = _LEVEL_MEMORY * self._seconds + seconds
        slope = (self._products + self._guess) / (self._squares + self._strength)
        self.of_rows = _within(slope, _ROW_RANGE)
        without = (self._seconds - self.of_rows * self._rows) / self._count
        self.of_none = max(without, self._least)


def _within(value: float, limits: tuple[float, float]) -> float:
    return min(max(value, limits[0]), limits[1])
