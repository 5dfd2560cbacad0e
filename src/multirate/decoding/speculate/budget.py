"""How far to draft: as far as a node's chance of acceptance is worth its time on this machine.
[ours]

A node that is reached with probability r adds r tokens and costs c seconds. It raises tokens per
second exactly if r / c exceeds the current rate. The minimum path probability of a node is
therefore c / v, where v is the current seconds per token, measured while decoding. A row's cost c
depends on how many rows there are already.
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
from multirate.runtime.fused import CAUGHT_UP_WITHIN

now = time.perf_counter

# How fast measurements fade: the share of a running mean that one more step leaves.
_MEMORY = 0.98  # seconds per token: about the last 50 steps
_PACE_MEMORY = 0.95  # measured over expected seconds of a kind of step: about the last 20
_USUAL_MEMORY = 0.99  # the usual ratio between the two kinds of step
_CATCHING_UP_MEMORY = 0.8  # seconds of reading the rows that the draft branch missed

# First guesses, and how many measured steps each guess weighs as much as.
_ACCEPTED, _GUESSED = 0.8, 3.0  # tokens that the method's own draft adds to a step
_MEASURED_LEVELS, _MEASURED = 5, 8.0  # the same, where the model card has acceptance rates
_PACE_STEPS = 4.0  # step times are what the costs say
_USUAL_STEPS = 20.0  # both kinds of step deviate from the costs alike
_DRAFTS = 2.0  # drafting takes what the costs say
_CAUGHT_UP = 2.0  # catching up takes what the costs say

# Limits of what is measured, so that one bad measurement cannot decide for long.
_LEAST, _MOST = 0.02, 0.9  # a node's minimum path probability
_SLOWEST = 0.3, 6.0  # measured over expected seconds of a step
_DRAFT_RANGE = 20.0  # measured over expected seconds of drafting, at most; at least 1 / this
_DEAREST_LEVEL = 5.0  # extra seconds of a level, in units of its expected seconds
_LEAST_OWN = 0.4, 0.7  # pace of steps with own drafts over that of steps without: one sequence
# (its costs may have been measured while another program ran), and several

# When the method's own drafts are tried although they are expected to lose.
_EXPLORED = 0.01  # share of the time that such trials may take
_MOST_CREDIT = 2.0  # plain steps' time that can be saved up for them
_FIRST_CREDIT = 1.0  # plain steps' time at the start of a text, over the number of texts in a row
# that own drafts did not suit: useless trials grow with the logarithm of the number of texts
_RESTED = 3  # after this many steps without own drafts, the next one's time is not representative:
# the branch catches up, and its weights have left the processor's caches
_SWITCHING = 0.1  # tokens that own drafts may seem to lose before they stop, as restarting costs

_CHANGE = 0.05  # thresholds are computed again when prices have changed by this share
_HORIZON = 128  # tokens over which the cost of catching up is spread
_RAGGED = 0.35  # a batch's sequences end at different times, and one that ends early saves little:
# a drafted token is worth 1 / (1 + this · √ln(sequences)), as the largest of several sums grows
_TRIED_PLAIN = 2  # plain steps that a batch of a new size takes first, to compare with


class Plan(NamedTuple):
    """What a step drafts with."""

    own: bool
    """Whether the method's own drafts are used, in all sequences."""
    text: tuple[int, ...] = ()
    """Otherwise: how many looked-up tokens each sequence drafts; 0: a plain step."""


class BudgetPolicy:
    """Decides before each step what to draft with and, by thresholds, how far.

    It compares the method's own drafts, text lookup and no draft by what they add to a plain step:
    the tokens that such drafts brought lately (acceptance_statistics.py), less their seconds at the
    current seconds per token. Own drafts that are not worth it are still tried for a share
    `_EXPLORED` of the time, so that they can come back. Each trial takes two steps, because the
    first after a pause is slower.

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
        accepted, weight = _ACCEPTED, _GUESSED
        if expected:
            accepted = expected_tokens(expected, _MEASURED_LEVELS) - 1
            weight = _MEASURED
        longest = longest if rates is None else rates.longest
        self._new_drafted = partial(DraftedSteps, longest, accepted, weight)
        # by the number of sequences in a step, as nodes cost more and drafts are shorter in a batch
        self._drafted: dict[int, DraftedSteps] = {}
        self._prices: dict[int, tuple[np.ndarray, list[float]]] = {}
        # catching up on a row computes what a level does, but reads no weights for it
        many = costs.verify_seconds(16) - costs.verify_seconds(8)
        row = max(many, 0.0) / 8 * min(costs.draft_step / costs.plain_step, 1.0)
        # rows that the branch caught up on after a pause, and their seconds
        self._caught_up = _CAUGHT_UP * nodes
        self._catching_up = row * self._caught_up
        self._rested = _RESTED  # steps without own drafts since the last with them
        self._look_again = False  # own drafts must run once more: the last step's time told nothing
        # before the first steps: as if speculation halved the time of a token
        self._seconds, self._tokens = costs.plain_step / 2, 1.0
        self._last: float | None = None
        self._credit = 0.0  # seconds that trials may take
        self._most_credit = _MOST_CREDIT * costs.plain_step
        self._unsuited = 0  # texts in a row in which own drafts were not worth it
        self._worth_it: bool | None = None  # whether own drafts were, in the last step
        self._paces: dict[int, _Paces] = {}  # by the sequences of a step
        self._pace = self._paces_of(1)
        # recent seconds of own drafts: measured (over the plain steps' pace), and by the costs
        self._timed_drafts = self._expected_drafts = _DRAFTS * self._drafting(1)
        self._step = _StepUnderWay(Plan(True), 1)
        self._priced_at: tuple[int, float, float] = (0, 1.0, 1.0)
        self._thresholds: tuple[np.ndarray, np.ndarray] | None = None
        self._per_token = self._seconds

    def interrupted(self) -> None:
        """The time until the next step does not count."""
        self._last = None

    def pause(self) -> None:
        """Another generation starts; the time until its first step does not count."""
        self._last = None
        self._rested, self._look_again = _RESTED, False
        for drafted in self._drafted.values():
            drafted.begin_text()
        if self._worth_it is not None:
            self._unsuited = 0 if self._worth_it else self._unsuited + 1
            self._worth_it = None
        credit = _FIRST_CREDIT / max(self._unsuited, 1)
        self._credit = max(self._credit, credit * self.costs.plain_step)

    def emitted(
        self,
        tokens: int,
        levels: int = 0,
        nodes: int = 0,
        matched: int = 0,
        draft_seconds: float | None = None,
        own: bool = True,
    ) -> None:
        """Records one sequence's step: the tokens it emitted, the levels and nodes of its draft,
        the length of the text's longest match, the seconds that drafting took (None: unknown), and
        whether the draft was an own one if the step had such.
        """
        step = self._step
        step.draft_seconds = draft_seconds
        self._tokens += 1 + (tokens - 1) * self._ending_sooner(step.sequences)
        step.levels = max(step.levels, levels)
        step.nodes.append(nodes)
        if step.plan.own and own:
            self._drafted_of(step.sequences).observe(matched, tokens - 1, levels, nodes)

    def thresholds(self, sequences: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """(draft_threshold, verify_threshold), [nodes] each, for the next step, in which a level
        serves `sequences` sequences. Call it once, at the start of each step.
        """
        begin = self.clock()
        if self._last is not None:
            self._took(begin - self._last)
        self._last = begin
        self._pace = self._paces_of(sequences)
        if sequences != self._step.sequences:  # first guess: scaled by the plain step's time
            before, now = self._step.sequences, sequences
            self._seconds *= self._plain(now) / now / (self._plain(before) / before)
        self._step = _StepUnderWay(Plan(True), sequences)
        self._per_token = self._seconds / max(self._tokens, 1e-3)
        row, level = self._pace.plain / self._per_token, self._pace.level / self._per_token
        level *= self._draft_pace
        of, row_then, level_then = self._priced_at
        change = max(abs(row / row_then - 1), abs(level / level_then - 1))
        if self._thresholds is None or of != sequences or change > _CHANGE:
            verify_threshold = self._row_prices(sequences)[0] * row
            draft_threshold = verify_threshold + self.costs.draft_step / sequences * level
            if sequences > 1:
                # a token is worth less the further its sequence is ahead of the others
                worth = self._ending_sooner(sequences) ** np.arange(1, self.nodes + 1)
                draft_threshold, verify_threshold = (
                    draft_threshold / worth,
                    verify_threshold / worth,
                )
            self._thresholds = _within(draft_threshold), _within(verify_threshold)
            self._priced_at = sequences, row, level
        return self._thresholds

    def choose(
        self,
        matches: Sequence[tuple[int, int]],
        remaining: int = _HORIZON,
        behind: int = 0,
        rests: bool = True,
        own: bool = True,
    ) -> Plan:
        """What the step that `thresholds` began drafts with.

        matches: for each sequence its text's match length, and how many tokens of the continuation
            are useful.
        remaining: tokens still to come.
        behind: rows that own drafts would have to catch up on first.
        rests: whether the step may be plain.
        own: whether own drafts are possible.
        """
        lengths, text = [], 0.0
        for matched, most in matches:
            length, gain = self._text_gain(matched, most)
            text += gain
            lengths.append(length)
        text *= self._ending_sooner(len(matches))
        gain = self._own_gain([matched for matched, _ in matches])
        refresh = behind * self._refresh_row
        enough = text - (_SWITCHING if self._timed and self._rested == 0 else 0.0)
        chosen = gain - refresh / self._per_token / max(1, min(remaining, _HORIZON)) >= enough
        if own:
            self._worth_it = chosen
        # the costs are of one sequence; a batch first times plain steps to compare with
        unknown = rests and self._timed and len(matches) > 1
        timing = unknown and self._pace.plain_steps < _TRIED_PLAIN
        if not own or remaining < 1 or timing:
            chosen = False  # at 0 the step's own token is the last one
        elif not rests and not any(lengths):
            chosen = True
        elif not chosen:
            loss = max(text - gain, 0.0) * self._per_token + refresh
            again = self._look_again and not any(lengths)
            # a loss above the most credit may be a wrong guess: it is tried once, as a debt
            if again or loss <= self._credit or self._credit >= self._most_credit:
                chosen = True
                self._credit -= loss
        self._step.plan = Plan(True) if chosen else Plan(False, tuple(lengths))
        self._step.refreshed = behind if chosen else 0
        return self._step.plan

    def _text_gain(self, matched: int, most: int) -> tuple[int, float]:
        """How many looked-up tokens are worth verifying after a match of this length, and the
        tokens that they add to a step, less what their time is worth.
        """
        assert self._thresholds is not None
        length, gain = 0, 0.0
        if matched and self.rates is not None:
            least = self._thresholds[1]
            here, onward = self.rates.first_alone[matched], self.rates.next_accepted[matched]
            while length < most and here >= least[length]:
                gain += float(here - least[length])
                here *= onward
                length += 1
        return length, gain

    def _own_gain(self, matched: Sequence[int]) -> float:
        """Tokens that the method's own drafts add to a step of these sequences, less what their
        time is worth.
        """
        tokens = levels = rows = 0.0
        cumulated, drafted = self._row_prices(len(matched))[1], self._drafted_of(len(matched))
        for length in matched:
            accepted, deep, nodes = drafted.means(length)
            tokens += accepted
            levels = max(levels, deep)
            whole = min(int(nodes), self.nodes - 1)
            rows += cumulated[whole] + (nodes - whole) * (cumulated[whole + 1] - cumulated[whole])
        plain = self._plain(len(matched))
        drafting = self._draft_pace * self._drafting(levels)
        own = self._pace.own * (plain + rows + drafting)
        seconds = own - self._pace.plain * plain
        return tokens * self._ending_sooner(len(matched)) - seconds / self._per_token

    def _drafting(self, levels: float) -> float:
        """Seconds of drafting this many levels, by the costs."""
        return self.costs.draft_fixed + max(levels, 1.0) * self.costs.draft_step

    @property
    def _draft_pace(self) -> float:
        """Measured drafting time divided by what the costs say."""
        if not self._expected_drafts:
            return 1.0
        return min(max(self._timed_drafts / self._expected_drafts, 1 / _DRAFT_RANGE), _DRAFT_RANGE)

    def _observe_draft(self, seconds: float, said: float) -> None:
        """Records a draft that took this many seconds, where the costs say `said`."""
        seconds = min(seconds, 3 * self._draft_pace * said)  # an interruption is not the draft's
        self._timed_drafts = _PACE_MEMORY * self._timed_drafts + seconds
        self._expected_drafts = _PACE_MEMORY * self._expected_drafts + said

    @property
    def _refresh_row(self) -> float:
        """Seconds per row that own drafts catch up on."""
        return self._catching_up / self._caught_up

    def _observe_catching_up(self, seconds: float, rows: int) -> None:
        """Records how long catching up on this many rows took."""
        seconds = min(max(seconds, 0.0), 3 * rows * self._refresh_row + self.costs.plain_step)
        self._catching_up = _CATCHING_UP_MEMORY * self._catching_up + seconds
        self._caught_up = _CATCHING_UP_MEMORY * self._caught_up + rows

    def _ending_sooner(self, sequences: int) -> float:
        """The share of a batch's drafted tokens that makes it end earlier."""
        return 1 / (1 + _RAGGED * math.sqrt(math.log(sequences)))

    def _plain(self, sequences: int) -> float:
        costs = self.costs
        if sequences == 1:
            return costs.plain_step
        return costs.plain_step + costs.verify_seconds(sequences) - costs.verify_seconds(1)

    def _drafted_of(self, sequences: int) -> DraftedSteps:
        """Statistics of own drafts in steps of this many sequences; at first the first guess."""
        if sequences not in self._drafted:
            self._drafted[sequences] = self._new_drafted()
        return self._drafted[sequences]

    def _paces_of(self, sequences: int) -> _Paces:
        """Timing of steps of this many sequences; at first that of the last ones."""
        if sequences not in self._paces:
            guess = (self._pace.plain, self._pace.own) if self._paces else (1.0, 1.0)
            batch = sequences > 1  # the costs are of one sequence
            steps = 1.0 if batch else _PACE_STEPS
            self._paces[sequences] = _Paces(guess, steps * self._plain(sequences), batch)
        return self._paces[sequences]

    def _took(self, seconds: float) -> None:
        """The current step has ended."""
        step = self._step
        cumulated = self._row_prices(step.sequences)[1]
        expected = self._plain(step.sequences)
        expected += sum(cumulated[min(nodes, self.nodes)] for nodes in step.nodes)
        drafting = refresh = 0.0
        after_rest = False
        if step.plan.own:
            after_rest = self._timed and (self._rested >= _RESTED or step.refreshed > self.nodes)
            own, refresh = self._drafting(step.levels), step.refreshed * self._refresh_row
            if step.draft_seconds is not None and self._timed:
                seconds_of_draft = step.draft_seconds / self._pace.plain
                said = own + refresh if step.refreshed <= CAUGHT_UP_WITHIN else own
                if not after_rest or seconds_of_draft < self._draft_pace * said:
                    self._observe_draft(seconds_of_draft, said)
            drafting = self._draft_pace * (own + refresh)
        expected += drafting
        usual = (self._pace.own if step.plan.own else self._pace.plain) * expected
        # an interruption is not the step's
        seconds = min(seconds, 3 * usual) if self._timed else expected
        self._seconds = _MEMORY * (self._seconds + seconds)
        self._tokens *= _MEMORY
        if after_rest:
            if step.refreshed > self.nodes:
                beyond = seconds / self._pace.own - (expected - self._draft_pace * refresh)
                self._observe_catching_up(beyond, step.refreshed)
        elif self._timed:  # else steps take what costs say
            self._pace.observe(seconds, expected, drafting if step.plan.own else None)
        self._look_again = after_rest
        self._rested = 0 if step.plan.own else self._rested + 1
        self._credit = min(self._credit + _EXPLORED * seconds, self._most_credit)

    def _row_prices(self, sequences: int) -> tuple[np.ndarray, list[float]]:
        """Seconds of the n-th node of a sequence's draft, if each of `sequences` sequences has as
        many, and of the first n nodes.
        """
        found = self._prices.get(sequences)
        if found is None:
            rows = range(sequences, sequences * (self.nodes + 1) + 1, sequences)
            seconds = [self.costs.verify_seconds(count) / sequences for count in rows]
            slopes = convex_slopes(seconds)
            found = self._prices[sequences] = slopes, [0.0, *slopes.cumsum().tolist()]
        return found


def _within(thresholds: np.ndarray) -> np.ndarray:
    # np.clip takes three times as long
    return np.minimum(np.maximum(thresholds, _LEAST), _MOST)


@dataclass
class _StepUnderWay:
    plan: Plan
    sequences: int
    levels: int = 0
    nodes: list[int] = field(default_factory=list)
    refreshed: int = 0
    draft_seconds: float | None = None


class _Paces:
    """Measured times of steps of this many sequences, divided by what the costs say: `plain` for
    steps without own drafts, `own` with them, `level` for drafting.

    A machine's speed may change while all steps are of one kind. The other kind's measurements
    therefore fade towards the usual ratio of both.

    guess: the first guess of all three; strength: the expected seconds it counts as.
    """

    def __init__(self, guess: tuple[float, float], strength: float, levels: bool) -> None:
        self._strength, self._levels = strength, levels
        # of steps without and with own drafts, each
        self._guess = [float(ratio) for ratio in guess]
        self._seconds, self._expected = [0.0, 0.0], [0.0, 0.0]
        weight = _USUAL_STEPS * strength / _PACE_STEPS
        self._usual_seconds = [weight * ratio for ratio in guess]
        self._usual_expected = [weight, weight]
        self._drafting = 0.0  # of the expected seconds of steps with own drafts
        self.plain, self.own = guess
        self.level = self.plain
        self.plain_steps = 0

    def observe(self, seconds: float, expected: float, drafting: float | None) -> None:
        """Records a step with its expected seconds, `drafting` of them for own drafts, if it had
        any.
        """
        kind = int(drafting is not None)
        self.plain_steps += not kind
        for i in (0, 1):
            self._expected[i] *= _PACE_MEMORY
            self._seconds[i] *= _PACE_MEMORY
        self._expected[kind] += expected
        self._seconds[kind] += seconds
        self._usual_expected[kind] = _USUAL_MEMORY * self._usual_expected[kind] + expected
        self._usual_seconds[kind] = _USUAL_MEMORY * self._usual_seconds[kind] + seconds
        usual = [self._usual_seconds[i] / self._usual_expected[i] for i in (0, 1)]
        now = self._estimate(kind)
        for i in (0, 1):  # towards what this kind takes now, times the ratio
            towards = now * usual[i] / usual[kind]
            self._guess[i] += (1 - _PACE_MEMORY) * (towards - self._guess[i])
        low, high = _SLOWEST
        self.plain, self.own = (min(max(self._estimate(i), low), high) for i in (0, 1))
        self.own = max(self.own, _LEAST_OWN[self._levels] * self.plain)
        self.level = self.plain
        self._drafting = _PACE_MEMORY * self._drafting + (drafting or 0.0)
        if self._levels and self._drafting:
            beyond = (self.own - self.plain) * self._expected[1] / self._drafting
            self.level = self.plain + min(max(beyond, 0.0), _DEAREST_LEVEL * self.plain)

    def _estimate(self, kind: int) -> float:
        """The recent estimate for steps without (0) and with (1) own drafts."""
        seconds = self._seconds[kind] + self._strength * self._guess[kind]
        return seconds / (self._expected[kind] + self._strength)
