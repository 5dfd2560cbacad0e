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
from multirate.decoding.speculate.step_pace import BatchPace, SinglePace, StepPace
from multirate.runtime.fused import CAUGHT_UP_WITHIN

now = time.perf_counter

# How fast measurements fade: the share of a running mean that one more step leaves.
_MEMORY = 0.98  # seconds per token: about the last 50 steps
_PACE_MEMORY = 0.95  # measured over expected seconds of drafts: about the last 20
_CATCHING_UP_MEMORY = 0.8  # seconds of reading the rows that the draft branch missed

# First guesses, and how many measured steps each guess weighs as much as.
_ACCEPTED, _GUESSED = 0.8, 3.0  # tokens that the method's own draft adds to a step
_MEASURED_LEVELS, _MEASURED = 5, 8.0  # the same, where the model card has acceptance rates
_DRAFTS = 2.0  # drafting takes what the costs say
_CAUGHT_UP = 2.0  # catching up takes what the costs say

# Limits of what is measured, so that one bad measurement cannot decide for long.
_LEAST, _MOST = 0.02, 0.9  # a node's minimum path probability
_DRAFT_RANGE = 20.0  # measured over expected seconds of drafting, at most; at least 1 / this

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
_LOOKED = 8  # steps of a batch in which drafts are looked for, at least, before it goes without
_LEAST_GAIN = 0.02  # the share of a plain step's tokens that makes looking for drafts pay
_UNLOOKED = 8, 64  # plain steps until drafts are looked for again: at first, and at most
_MEASURED_ROWS = 64  # steps without a draft until text lookup tries one
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
        self._paces: dict[int, StepPace] = {}  # by the sequences of a step
        self._draft_paces: dict[int, _DraftPace] = {}
        self._pace, self._draft_pace = self._paces_of(1)
        self._outlooks: dict[int, _Outlook] = {}  # by the sequences of a step
        self._refilled = False
        self._step = _StepUnderWay(Plan(True), 1)
        self._priced_at = 0, False, 1.0, 1.0  # sequences, refilled, price of a row and of a level
        self._thresholds: tuple[np.ndarray, np.ndarray] | None = None
        self._unmeasured = 0  # steps since the last one with a draft
        self._per_token = self._seconds

    def interrupted(self) -> None:
        """The last step ends here; the time until the next one does not count."""
        if self._last is not None:
            self._took(self.clock() - self._last)
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

    def thresholds(
        self, sequences: int = 1, refilled: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """(draft_threshold, verify_threshold), [nodes] each, for the next step, in which a level
        serves `sequences` sequences. Call it once, at the start of each step. refilled: whether
        others take the place of sequences that end.
        """
        begin = self.clock()
        if self._last is not None:
            self._took(begin - self._last)
        self._last = begin
        self._refilled = refilled
        self._pace, self._draft_pace = self._paces_of(sequences)
        if sequences != self._step.sequences:  # first guess: scaled by the plain step's time
            before, now = self._step.sequences, sequences
            self._seconds *= self._plain(now) / now / (self._plain(before) / before)
        self._step = _StepUnderWay(Plan(True), sequences)
        self._per_token = self._seconds / max(self._tokens, 1e-3)
        row = self._pace.row / self._per_token
        drafting = self._pace.drafting * self._draft_pace.pace
        level = drafting * self._level(sequences) / sequences / self._per_token
        *of, row_then, level_then = self._priced_at
        change = max(abs(row - row_then) / row_then, abs(level - level_then) / (level_then or 1.0))
        if self._thresholds is None or of != [sequences, refilled] or change > _CHANGE:
            verify_threshold = self._row_prices(sequences)[0] * row
            draft_threshold = verify_threshold + level
            if sequences > 1 and not refilled:
                # a token is worth less the further its sequence is ahead of the others
                worth = self._ending_sooner(sequences) ** np.arange(1, self.nodes + 1)
                draft_threshold, verify_threshold = (
                    draft_threshold / worth,
                    verify_threshold / worth,
                )
            self._thresholds = _within(draft_threshold), _within(verify_threshold)
            self._priced_at = sequences, refilled, row, level
        return self._thresholds

    def skips_drafts(self) -> bool:
        """Makes the step that `thresholds` began plain if drafts brought little lately in steps of
        so many sequences, and returns whether it did: then neither `choose` nor `emitted` is called
        for it.
        """
        step = self._step
        if step.sequences == 1 or not self._timed or self._look_again:
            return False
        if not self._outlook.skips():
            return False
        self._tokens += step.sequences
        step.plan = Plan(False)
        return True

    @property
    def _outlook(self) -> _Outlook:
        return self._outlooks.setdefault(self._step.sequences, _Outlook())

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
        gain = self._own_gain([matched for matched, _ in matches]) if own else 0.0
        self._outlook.observe(max(text, gain) / len(matches))
        refresh = behind * self._refresh_row
        enough = text - (_SWITCHING if self._timed and self._rested == 0 else 0.0)
        chosen = gain - refresh / self._per_token / max(1, min(remaining, _HORIZON)) >= enough
        if own:
            self._worth_it = chosen
        # the costs are of one sequence; a batch first times plain steps to compare with
        unknown = rests and self._timed and len(matches) > 1
        timing = unknown and self._pace.plain_steps < _TRIED_PLAIN
        if timing:
            chosen, lengths = False, [0] * len(lengths)
        elif not own or remaining < 1:
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
        due = self._timed and self.rates is not None and self._unmeasured >= _MEASURED_ROWS
        if due and not chosen and not timing and remaining >= 1 and not any(lengths):
            self._try_text(matches, lengths)
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

    def _try_text(self, matches: Sequence[tuple[int, int]], lengths: list[int]) -> None:
        """Drafts the likeliest of the looked-up tokens: where a row's time was once measured too
        long, no row would be drafted again, and its time not be measured.
        """
        assert self.rates is not None
        chances = [self.rates.first_alone[matched] if most else 0.0 for matched, most in matches]
        best = int(np.argmax(chances))
        if matches[best][0] and chances[best]:
            lengths[best] = 1

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
        drafting = self._draft_pace.pace * self._drafting(levels, len(matched))
        seconds = self._pace.seconds(plain, rows, drafting) - self._pace.seconds(plain, 0.0, None)
        return tokens * self._ending_sooner(len(matched)) - seconds / self._per_token

    def _level(self, sequences: int) -> float:
        """Seconds of a drafted level of so many sequences: what the costs say of one sequence,
        times how much longer a plain step takes.
        """
        return self.costs.draft_step * self._plain(sequences) / self.costs.plain_step

    def _drafting(self, levels: float, sequences: int) -> float:
        """Seconds of drafting this many levels, by the costs."""
        return self.costs.draft_fixed + max(levels, 1.0) * self._level(sequences)

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
        if self._refilled:
            return 1.0
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

    def _paces_of(self, sequences: int) -> tuple[StepPace, _DraftPace]:
        """Timing of steps of this many sequences. A batch begins with that of the last ones."""
        if sequences not in self._paces:
            plain = self._plain(sequences)
            self._paces[sequences] = (
                SinglePace(plain)
                if sequences == 1
                else BatchPace(plain, (self._pace.plain, self._pace.row))
            )
            self._draft_paces[sequences] = _DraftPace(_DRAFTS * self._drafting(1, sequences))
        return self._paces[sequences], self._draft_paces[sequences]

    def _took(self, seconds: float) -> None:
        """The current step has ended."""
        step, pace, drafts = self._step, self._pace, self._draft_pace
        cumulated = self._row_prices(step.sequences)[1]
        plain = self._plain(step.sequences)
        rows = sum(cumulated[min(nodes, self.nodes)] for nodes in step.nodes)
        drafting, refresh = None, 0.0
        after_rest = False
        if step.plan.own:
            after_rest = self._timed and (self._rested >= _RESTED or step.refreshed > self.nodes)
            own = self._drafting(step.levels, step.sequences)
            refresh = step.refreshed * self._refresh_row
            if step.draft_seconds is not None and self._timed:
                seconds_of_draft = step.draft_seconds / pace.drafting
                said = own + refresh if step.refreshed <= CAUGHT_UP_WITHIN else own
                if not after_rest or seconds_of_draft < drafts.pace * said:
                    drafts.observe(seconds_of_draft, said)
            drafting = drafts.pace * (own + refresh)
        # an interruption is not the step's
        usual = pace.seconds(plain, rows, drafting)
        seconds = min(seconds, 3 * usual) if self._timed else plain + rows + (drafting or 0.0)
        self._seconds = _MEMORY * (self._seconds + seconds)
        self._tokens *= _MEMORY
        if after_rest:
            if step.refreshed > self.nodes:
                before = pace.seconds(plain, rows, drafts.pace * own)
                self._observe_catching_up((seconds - before) / pace.drafting, step.refreshed)
        elif self._timed:  # else steps take what costs say
            pace.observe(seconds, plain, rows, drafting, step.draft_seconds)
        self._look_again = after_rest
        self._unmeasured = 0 if any(step.nodes) else self._unmeasured + 1
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


class _Outlook:
    """Whether it pays to look for drafts, by what the last ones were expected to bring."""

    def __init__(self) -> None:
        self._looked, self._gain = 0, 0.0
        self._pause = _UNLOOKED[0]
        self._left = 0  # steps without

    def observe(self, gain: float) -> None:
        """Records what drafts would add to a step, as a share of a plain step's tokens."""
        self._looked += 1
        self._gain += max(gain, 0.0)
        if self._looked < _LOOKED:
            return
        if self._gain < _LEAST_GAIN * self._looked:
            self._left = self._pause
            self._pause = min(2 * self._pause, _UNLOOKED[1])
        else:
            self._pause = _UNLOOKED[0]
        self._looked, self._gain = 0, 0.0

    def skips(self) -> bool:
        """Whether the step that begins is one without; call it once for each step."""
        if not self._left:
            return False
        self._left -= 1
        return True


class _DraftPace:
    """Measured over expected seconds of own drafts, lately; at first 1, which counts as `expected`
    seconds.
    """

    def __init__(self, expected: float) -> None:
        self._measured = self._expected = expected

    @property
    def pace(self) -> float:
        if not self._expected:
            return 1.0
        return min(max(self._measured / self._expected, 1 / _DRAFT_RANGE), _DRAFT_RANGE)

    def observe(self, seconds: float, said: float) -> None:
        """Records a draft that took this many seconds, where the costs say `said`."""
        seconds = min(seconds, 3 * self.pace * said)  # an interruption is not the draft's
        self._measured = _PACE_MEMORY * self._measured + seconds
        self._expected = _PACE_MEMORY * self._expected + said


@dataclass
class _StepUnderWay:
    plan: Plan
    sequences: int
    levels: int = 0
    nodes: list[int] = field(default_factory=list)
    refreshed: int = 0
    draft_seconds: float | None = None
