"""The budget policy: what each step drafts with, and how far. [ours]

A step takes one of three arms: no draft, tokens looked up in the text, or the drafter's own tokens.
An arm is worth the tokens that it adds to a step, minus what its seconds are worth at the present
seconds per token:

    worth = tokens − seconds / (seconds per token)

Tokens are fading means by the length of the text's match (acceptance_statistics.py). Seconds are
costs that were measured beforehand (costs.py), corrected by fading ratios of timed steps (_Speed):

    seconds = machine · rows                              without own drafts
    seconds = machine · own · (rows + drafting · levels)  with them

The step takes the arm that is worth most. The same prices bound a draft tree: a node that is
reached with probability r and costs c seconds is drafted where r > c / (seconds per token).

Own drafts that are worth less are still tried, for a share `_EXPLORED` of the time, so that they
come back when they become good.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from multirate.decoding.speculate.acceptance_statistics import ContinuationRates, DraftedSteps
from multirate.decoding.speculate.step_costs import StepCosts, convex_slopes, expected_tokens

now = time.perf_counter

_MEMORY = 0.98  # of the seconds per token: about the last fifty steps
_TIMED_MEMORY = 0.95  # of the ratios
_TIMED_STEPS = 4.0  # steps' worth of evidence that a ratio's first value of 1 counts as
_SLOWEST = 20.0  # a ratio is at most this, and at least 1 / this
_INTERRUPTED = 3.0  # times the expected seconds: what takes longer was interrupted
_THRESHOLDS = 0.02, 0.9  # least and greatest path probability that a node must have
_EXPLORED = 0.01  # share of the time for trying own drafts that are worth less
_MOST_CREDIT = 2.0  # cap of the time saved for that, in plain steps
_GUESSED, _GUESSED_STEPS = 0.8, 3.0  # tokens that own drafts add to a step if no model card gives
# them, and how many steps' worth of evidence this counts as
_CARD_LEVELS, _CARD_STEPS = 5, 8.0  # the same with a card: by its acceptance of so many levels
_RESTED = 3  # after so many steps without own drafts, the first one with them is not timed: the
# processor's caches are cold
_HORIZON = 128  # tokens over which own drafts pay for the rows that they catch up on
_COMPARED = 2  # plain steps of a batch before it drafts
_COMPARED_WITHIN = 8  # a step with own drafts corrects `own` if a step without them was at most so
# many steps ago, and `machine` otherwise
_RAGGED = 0.35  # a batch ends with its slowest sequence, so a drafted token of n sequences counts
# as 1 / (1 + _RAGGED √ln n): the largest of n sums grows like this


class Plan(NamedTuple):
    """What a step drafts with."""

    own: bool
    """Whether the drafter's own tokens are used, in all sequences."""
    text: tuple[int, ...] = ()
    """Otherwise: how many looked-up tokens each sequence drafts; 0: a plain step."""


class BudgetPolicy:
    """Decides before each step what to draft with and, by thresholds, how far.

    costs: measured parts of a step.
    nodes: maximum number in a draft.
    rates: of text lookup; None: there is none.
    expected: acceptance of own drafts by depth, as measured before (from a model card); empty:
        unknown.
    clock: seconds; simulations use another one than the machine's.
    timed: False: steps take what `costs` say, so that no decision depends on a clock.
    longest: the maximum match length by which own drafts that continue the text are counted.
    """

    def __init__(
        self,
        costs: StepCosts,
        nodes: int = 8,
        rates: ContinuationRates | None = None,
        expected: Sequence[float] = (),
        clock: Callable[[], float] | None = None,
        timed: bool = True,
        longest: int = 0,
    ) -> None:
        self.costs, self.nodes, self.rates, self.clock = costs, nodes, rates, clock or now
        self._timed = timed
        guess = _GUESSED, _GUESSED_STEPS
        if expected:
            guess = expected_tokens(expected, _CARD_LEVELS) - 1, _CARD_STEPS
        longest = longest if rates is None else rates.longest
        self._new_drafted = partial(DraftedSteps, longest, *guess)
        # by the sequences of a step: the more, the more expensive a node, the shorter the drafts
        self._drafted: dict[int, DraftedSteps] = {}
        self._prices: dict[int, _RowPrices] = {}
        self._speeds: dict[int, _Speed] = {}
        self._speed = self._speed_of(1)
        # before the first steps: as if speculation halved the time of a token
        self._seconds, self._tokens = costs.plain_step / 2, 1.0
        self._step = _StepUnderWay(Plan(True), 1)
        self._last: float | None = None
        self._rested = _RESTED  # steps since the last one with own drafts
        self._try_again = False  # whether to repeat own drafts, because their step was not timed
        self._credit = 0.0  # seconds for trying own drafts that are worth less
        self._unsuited = 0  # texts in a row that own drafts did not suit
        self._suited: bool | None = None  # whether own drafts suited the text when last asked

    def pause(self) -> None:
        """Another generation starts; the time until its first step does not count."""
        self._last = None
        self._rested, self._try_again = _RESTED, False
        for drafted in self._drafted.values():
            drafted.begin_text()
        if self._suited is not None:
            self._unsuited = 0 if self._suited else self._unsuited + 1
            self._suited = None
        # the new text may suit own drafts better than the last one. All tries of useless drafts
        # together grow with the logarithm of the number of texts
        self._credit = max(self._credit, self.costs.plain_step / max(self._unsuited, 1))

    def thresholds(self, sequences: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """(draft_threshold, verify_threshold), [nodes] each, for the next step, in which a level
        serves `sequences` sequences. Call it once, at the start of each step.
        """
        begin = self.clock()
        if self._last is not None:
            self._took(begin - self._last)
        self._last = begin
        if sequences != self._step.sequences:  # rescale by what a plain step of a sequence costs
            before = self._step.sequences
            self._seconds *= self._plain(sequences) / sequences / (self._plain(before) / before)
        self._speed = self._speed_of(sequences)
        self._step = _StepUnderWay(Plan(True), sequences)
        self._per_token = self._seconds / max(self._tokens, 1e-3)
        machine, level = (
            self._speed.machine.value,
            self._speed.own_seconds(0.0, self.costs.draft_step),
        )
        verify = self._prices_of(sequences).each * machine
        draft = verify + level / sequences
        # the further one sequence of a batch gets ahead, the less another token of it is worth
        ahead = self._batch_discount(sequences) ** np.arange(1, self.nodes + 1)
        worth = self._per_token * ahead
        return _within(draft / worth), _within(verify / worth)

    def choose(
        self,
        matches: Sequence[tuple[int, int]],
        remaining: int = _HORIZON,
        behind: int = 0,
        rests: bool = True,
    ) -> Plan:
        """What the step that `thresholds` began drafts with.

        matches: for each sequence its text's match length, and how many tokens of the continuation
            are useful.
        remaining: tokens still to come.
        behind: rows that own drafts would have to catch up on first.
        rests: whether the step may be plain.
        """
        found = [self._text_worth(matched, most) for matched, most in matches]
        lengths = tuple(length for length, _ in found)
        text = sum(worth for _, worth in found) * self._batch_discount(len(matches))
        own = self._own_worth([matched for matched, _ in matches])
        catching_up = self._catching_up(behind)
        chosen = self._suited = (
            own - catching_up / self._per_token / max(1, min(remaining, _HORIZON)) >= text
        )
        # costs are of one sequence: plain steps of a batch are timed first, to compare with
        compares = rests and self._timed and len(matches) > 1
        if remaining < 1 or (compares and self._speed.plain_steps < _COMPARED):
            chosen = False  # where none remains, the step's own token is the last one
        elif not rests and not any(lengths):
            chosen = True
        elif not chosen:
            loss = max(text - own, 0.0) * self._per_token + catching_up
            # at full credit even what costs more is tried: the loss is only an estimate. Negative
            # credit is earned back
            affordable = loss <= self._credit or self._credit >= self._most_credit
            if affordable or (self._try_again and not any(lengths)):
                chosen = True
                self._credit -= loss
        self._step.plan = Plan(True) if chosen else Plan(False, lengths)
        self._step.caught_up = behind if chosen else 0
        return self._step.plan

    def emitted(
        self,
        tokens: int,
        levels: int = 0,
        nodes: int = 0,
        matched: int = 0,
        draft_seconds: float | None = None,
    ) -> None:
        """Records one sequence's step: the tokens it emitted, the levels and nodes of its draft,
        the seconds that drafting took (None: unknown), and the length of the text's longest match.
        """
        step = self._step
        step.draft_seconds = draft_seconds
        step.levels = max(step.levels, levels)
        step.nodes.append(nodes)
        self._tokens += 1 + (tokens - 1) * self._batch_discount(step.sequences)
        if step.plan.own:
            self._drafted_of(step.sequences).observe(matched, tokens - 1, levels, nodes)

    def _text_worth(self, matched: int, most: int) -> tuple[int, float]:
        """How many looked-up tokens are worth verifying after a match of this length, and what they
        are worth.
        """
        length, worth = 0, 0.0
        if not matched or self.rates is None:
            return length, worth
        reached, onward = self.rates.first_alone[matched], self.rates.next_accepted[matched]
        sequences = self._step.sequences
        prices = self._prices_of(sequences).each * self._speed.machine.value / self._per_token
        while length < most and reached >= prices[length]:
            worth += float(reached - prices[length])
            reached *= onward
            length += 1
        return length, worth

    def _own_worth(self, matched: Sequence[int]) -> float:
        """What own drafts are worth in a step of sequences with these match lengths."""
        sequences = len(matched)
        tokens = levels = rows = 0.0
        prices, drafted = self._prices_of(sequences), self._drafted_of(sequences)
        for length in matched:
            accepted, deep, nodes = drafted.means(length)
            tokens += accepted
            levels = max(levels, deep)
            rows += prices.of(nodes)
        speed, plain = self._speed, self._plain(sequences)
        seconds = speed.own_seconds(plain + rows, self._drafting(levels))
        seconds -= speed.machine.value * plain
        return tokens * self._batch_discount(sequences) - seconds / self._per_token

    def _took(self, seconds: float) -> None:
        """The step under way has ended."""
        step, speed = self._step, self._speed
        prices = self._prices_of(step.sequences)
        rows = self._plain(step.sequences) + sum(prices.of(nodes) for nodes in step.nodes)
        drafting = 0.0
        if step.plan.own:
            drafting = self._drafting(step.levels) + self._row * step.caught_up
        expected = speed.own_seconds(rows, drafting) if drafting else speed.machine.value * rows
        catches_up = step.caught_up > self.nodes
        first = step.plan.own and (catches_up or self._rested >= _RESTED)
        if not self._timed:
            seconds = expected
        else:
            seconds = min(seconds, _INTERRUPTED * expected)
            if not first or (seconds < expected and not catches_up):
                speed.observe(seconds, rows, drafting, step.draft_seconds)
        self._seconds = _MEMORY * (self._seconds + seconds)
        self._tokens *= _MEMORY
        self._try_again = first and self._timed
        self._rested = 0 if step.plan.own else self._rested + 1
        self._credit = min(self._credit + _EXPLORED * seconds, self._most_credit)

    @property
    def _most_credit(self) -> float:
        return _MOST_CREDIT * self.costs.plain_step

    @property
    def _row(self) -> float:
        """Seconds per row that own drafts catch up on: it passes the parts of a level, without
        reading weights again.
        """
        costs = self.costs
        row = max(costs.verify_seconds(16) - costs.verify_seconds(8), 0.0) / 8
        return row * min(costs.draft_step / costs.plain_step, 1.0)

    def _catching_up(self, rows: int) -> float:
        return self._speed.own_seconds(0.0, rows * self._row)

    def _drafting(self, levels: float) -> float:
        """Seconds of drafting this many levels, by the costs."""
        return self.costs.draft_fixed + max(levels, 1.0) * self.costs.draft_step

    def _plain(self, sequences: int) -> float:
        """Seconds of a step without drafts, by the costs."""
        costs = self.costs
        if sequences == 1:
            return costs.plain_step
        return costs.plain_step + costs.verify_seconds(sequences) - costs.verify_seconds(1)

    def _batch_discount(self, sequences: int) -> float:
        """What a drafted token of a batch counts as: only some make the batch end earlier."""
        return 1 / (1 + _RAGGED * math.sqrt(math.log(sequences)))

    def _drafted_of(self, sequences: int) -> DraftedSteps:
        """Statistics of own drafts in steps of this many sequences."""
        if sequences not in self._drafted:
            self._drafted[sequences] = self._new_drafted()
        return self._drafted[sequences]

    def _prices_of(self, sequences: int) -> _RowPrices:
        if sequences not in self._prices:
            self._prices[sequences] = _RowPrices(self.costs, self.nodes, sequences)
        return self._prices[sequences]

    def _speed_of(self, sequences: int) -> _Speed:
        """Ratios of steps of this many sequences."""
        if sequences not in self._speeds:
            plain = self._plain(sequences)
            machine = _TIMED_STEPS * plain if sequences == 1 else 0.0  # costs are of one sequence
            self._speeds[sequences] = _Speed(machine, plain, self._drafting(1.0))
        return self._speeds[sequences]


def _within(thresholds: np.ndarray) -> np.ndarray:
    least, greatest = _THRESHOLDS
    return np.minimum(np.maximum(thresholds, least), greatest)  # np.clip takes three times as long


@dataclass
class _StepUnderWay:
    plan: Plan
    sequences: int
    levels: int = 0
    nodes: list[int] = field(default_factory=list)
    caught_up: int = 0
    draft_seconds: float | None = None


class _RowPrices:
    """Seconds of the n-th node of a sequence's draft, where each of `sequences` sequences has as
    many: `each` [nodes].
    """

    def __init__(self, costs: StepCosts, nodes: int, sequences: int) -> None:
        rows = range(sequences, sequences * (nodes + 1) + 1, sequences)
        self.each = convex_slopes([costs.verify_seconds(count) / sequences for count in rows])
        self._sums = [0.0, *self.each.cumsum().tolist()]

    def of(self, nodes: float) -> float:
        """Seconds of a draft of this many nodes."""
        nodes = min(nodes, len(self.each))
        whole = min(int(nodes), len(self.each) - 1)
        return self._sums[whole] + (nodes - whole) * (self._sums[whole + 1] - self._sums[whole])


class _Ratio:
    """Timed over expected seconds, of late. guess: expected seconds that a first guess of 1 counts
    as.
    """

    def __init__(self, guess: float) -> None:
        self._timed = self._expected = guess

    @property
    def value(self) -> float:
        if not self._expected:
            return 1.0
        return min(max(self._timed / self._expected, 1 / _SLOWEST), _SLOWEST)

    def observe(self, seconds: float, expected: float) -> None:
        """`seconds` were timed where `expected` were expected."""
        seconds = min(max(seconds, 0.0), _INTERRUPTED * self.value * expected)
        self._timed = _TIMED_MEMORY * self._timed + seconds
        self._expected = _TIMED_MEMORY * self._expected + expected


class _Speed:
    """Three correction factors, recent timed seconds over expected ones: `machine` for every step,
    `own` on top for steps with own drafts, `drafting` on top for the drafting in them.

    While all steps have own drafts, a slow machine looks like slow drafts. Such steps therefore
    correct `own` only soon after a step without own drafts, and `machine` otherwise.

    machine, plain, drafting: the weight of the factors' first value 1, in expected seconds.
    """

    def __init__(self, machine: float, plain: float, drafting: float) -> None:
        self.machine, self.own = _Ratio(machine), _Ratio(_TIMED_STEPS * plain)
        self.drafting = _Ratio(_TIMED_STEPS * drafting)
        self.plain_steps = self._since_plain = 0

    def own_seconds(self, rows: float, drafting: float) -> float:
        """Of a step with own drafts with these seconds by the costs."""
        return self.machine.value * self.own.value * (rows + self.drafting.value * drafting)

    def observe(
        self, seconds: float, rows: float, drafting: float, draft_seconds: float | None
    ) -> None:
        """Records a step. drafting: 0 without own drafts. draft_seconds: those timed; None:
        unknown.
        """
        self._since_plain += 1
        if not drafting:
            self.plain_steps += 1
            self._since_plain = 0
            self.machine.observe(seconds, rows)
            return
        machine, own = self.machine.value, self.own.value
        expected = rows + self.drafting.value * drafting
        if draft_seconds is not None:
            self.drafting.observe(draft_seconds / (machine * own), drafting)
            seconds, expected = seconds - draft_seconds, rows
        if self._since_plain <= _COMPARED_WITHIN:
            self.own.observe(seconds / machine, expected)
        else:
            self.machine.observe(seconds / own, expected)
