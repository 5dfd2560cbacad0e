"""What a step drafts with, in simulated texts: never much worse than the best of plain steps, own
drafts and the text's continuations, and back again where drafts become good.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from multirate.decoding.speculate.acceptance_statistics import ContinuationRates
from multirate.decoding.speculate.budget import BudgetPolicy
from multirate.decoding.speculate.step_costs import StepCosts
from multirate.decoding.speculate.step_pace import BatchPace, SinglePace

COSTS = StepCosts(1.0, {1: 1.0, 2: 1.1, 8: 1.6, 16: 2.4}, 0.1, 0.05)
NODES = 8


class Text:
    """A machine and a text on which own drafts of `levels` levels are accepted at `own` per token
    and continuations, which `share` of the steps have, at `text`. expected: what a card says of
    own drafts. times_drafts: whether the machine tells what a draft took by itself.
    dear_after_rest: whether a draft after three steps without any takes twice as long, and rows
    that were put off take their time, too. costs: what steps take on this machine.
    """

    def __init__(
        self,
        own: float,
        text: float,
        share: float = 0.5,
        seed: int = 0,
        expected: tuple[float, ...] = (),
        times_drafts: bool = False,
        dear_after_rest: bool = False,
        costs: StepCosts = COSTS,
    ) -> None:
        self.costs = costs
        self.own, self.text, self.share, self.levels = own, text, share, 3
        self.times_drafts, self.dear_after_rest = times_drafts, dear_after_rest
        self.behind = self.rested = 0
        self.now = 0.0
        self.rates = ContinuationRates(4)
        self.policy = BudgetPolicy(COSTS, NODES, self.rates, expected, clock=lambda: self.now)
        self.rng = np.random.default_rng(seed)
        self.streamed = 0

    def _accepted(self, rate: float, length: int) -> int:
        return int(np.cumprod(self.rng.random(length) < rate).sum())

    def step(self, force: str | None = None) -> int:
        """One step → the tokens it emitted. force: stream, text or plain, whatever is chosen."""
        self.policy.thresholds()
        matched = 3 if self.rng.random() < self.share else 0
        behind = self.behind if self.dear_after_rest else 0
        plan = self.policy.choose([(matched, NODES)], behind=behind, rests=force != "stream")
        stream, length = plan.own, sum(plan.text)
        if force is not None:
            stream, length = force == "stream", NODES if force == "text" and matched else 0
        held = self._accepted(self.text, NODES) if matched else 0
        levels = self.levels if stream else 0
        drafting = self.costs.draft_fixed + levels * self.costs.draft_step if stream else 0.0
        if stream and self.dear_after_rest:
            drafting *= 2 if self.rested > 2 else 1
            self.now += 0.01 * behind if behind > NODES else 0.0
        self.now += drafting
        if stream:
            accepted, length = self._accepted(self.own, levels), levels
        else:
            accepted = min(held, length)
        self.now += self.costs.verify_seconds(1 + length)
        self.streamed += stream
        self.rested = 0 if stream else self.rested + 1
        self.behind = (0 if stream else self.behind) + 1 + accepted
        if matched:
            said = [0] * held + [1] * (NODES - held)
            self.rates.observe_text([0] * NODES, matched, said[: accepted + 1])
        told = drafting if self.times_drafts else None
        self.policy.emitted(1 + accepted, levels, length, matched, told)
        return 1 + accepted

    def speed(self, steps: int, force: str | None = None) -> float:
        begin = self.now
        tokens = sum(self.step(force) for _ in range(steps))
        return tokens / (self.now - begin)


@pytest.mark.parametrize("text", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("own", [0.0, 0.1, 0.3, 0.6, 0.9])
def test_never_much_below_the_best_of_its_parts(own: float, text: float) -> None:
    parts = [Text(own, text).speed(1500, force) for force in ("plain", "stream", "text")]
    assert Text(own, text).speed(1500) > 0.96 * max(parts)


def test_useless_drafts_cost_little_from_the_beginning() -> None:
    assert Text(0.0, 0.0, share=0.0).speed(100) > 0.95
    late = Text(0.0, 0.0, share=0.0)
    late.speed(100)
    assert late.speed(500) > 0.98


def test_drafts_come_back_when_they_become_good() -> None:
    text = Text(0.0, 0.0, share=0.0)
    text.speed(300)
    before, text.own = text.streamed, 0.9
    text.speed(600)
    assert text.streamed - before > 300


CARD = (0.5, 0.45)


def test_texts_that_drafts_do_not_suit_say_little_of_the_next() -> None:
    """As translations say little of mathematics in a benchmark of both."""
    share = []
    for seed in range(20):
        text = Text(0.6, 0.0, share=0.0, seed=seed, expected=CARD)
        for own in (0.6, 0.6, 0.6, 0.1, 0.1, 0.1, 0.1, 0.6):
            text.policy.pause()
            text.own, text.streamed = own, 0
            for _ in range(60):
                text.step()
        share.append(text.streamed / 60)
    assert np.mean(share) > 0.5


@pytest.mark.parametrize("own", [0.0, 0.2, 0.45, 0.6])
def test_answers_after_one_another_cost_little_whatever_the_card_says(own: float) -> None:
    """Each answer is a chance that drafts suit it: tried at its begin, and soon left alone."""

    def answers(force: str | None) -> float:
        tokens, seconds = 0, 0.0
        for seed in range(4):
            text = Text(own, 0.0, share=0.0, seed=seed, expected=CARD)
            for _ in range(10):
                text.policy.pause()
                tokens += sum(text.step(force) for _ in range(80))
            seconds += text.now
        return tokens / seconds

    assert answers(None) > 0.96 * max(answers("plain"), answers("stream"))


@pytest.mark.parametrize("expected", [(), CARD])
def test_a_text_that_drafts_suit_is_drafted_for_whatever_the_last_one_was(
    expected: tuple[float, ...],
) -> None:
    """Eight steps of another text without one accepted token, then an answer of sixty steps."""
    share = []
    for seed in range(20):
        text = Text(0.0, 0.0, share=0.0, seed=seed, expected=expected)
        text.policy.pause()
        for _ in range(8):
            text.step()
        text.own, text.streamed = 0.6, 0
        text.policy.pause()
        for _ in range(60):
            text.step()
        share.append(text.streamed / 60)
    assert np.mean(share) > 0.3


@pytest.mark.parametrize("times", [3, 10])
def test_drafts_whose_costs_were_measured_too_high_are_found_out(times: int) -> None:
    """Something else ran while they were measured. They are tried, and their steps are timed."""
    text = Text(0.8, 0.0, share=0.0)
    costs = replace(COSTS, draft_step=times * COSTS.draft_step)
    text.policy = BudgetPolicy(costs, NODES, text.rates, clock=lambda: text.now)
    text.speed(600)
    before = text.streamed
    text.speed(400)
    assert text.streamed - before > 300


@pytest.mark.parametrize(("row", "said"), [(0.3, 0.05), (0.05, 0.5), (0.05, 1.2)])
@pytest.mark.parametrize("accepted", [0.2, 0.5, 0.8])
def test_rows_whose_costs_were_measured_wrong_are_found_out(
    row: float, said: float, accepted: float
) -> None:
    """As by a server that starts while the machine is busy."""

    def costs(row: float) -> StepCosts:
        return replace(COSTS, verify={1: 1.0, 16: 1.0 + 15 * row})

    def text() -> Text:
        return Text(0.0, accepted, share=0.8, costs=costs(row))

    found, right = text(), text()
    found.policy = BudgetPolicy(costs(said), NODES, found.rates, clock=lambda: found.now)
    right.policy = BudgetPolicy(costs(row), NODES, right.rates, clock=lambda: right.now)
    found.speed(100)
    right.speed(100)
    assert found.speed(1000) > 0.94 * right.speed(1000)


@pytest.mark.parametrize("times", [0.2, 1.0, 3.0, 10.0])
def test_the_price_of_a_level_is_what_drafts_are_timed_to_take(times: float) -> None:
    """Whatever was measured before. A step is timed whole, a draft by itself."""
    text = Text(0.7, 0.0, share=0.0, times_drafts=True)
    text.speed(400, "stream")
    right, _ = text.policy.thresholds()
    text = Text(0.7, 0.0, share=0.0, times_drafts=True)
    costs = replace(
        COSTS, draft_step=times * COSTS.draft_step, draft_fixed=times * COSTS.draft_fixed
    )
    text.policy = BudgetPolicy(costs, NODES, text.rates, clock=lambda: text.now)
    text.speed(400, "stream")
    timed, _ = text.policy.thresholds()
    np.testing.assert_allclose(timed, right, rtol=0.15)


def test_a_prompt_that_is_read_late_does_not_make_levels_look_cheap() -> None:
    """It is read before the time of the draft begins."""
    text = Text(0.7, 0.0, share=0.0, times_drafts=True)
    text.speed(200, "stream")
    before, _ = text.policy.thresholds()
    text.policy.choose([(0, 0)], behind=1000)
    drafting = COSTS.draft_fixed + 3 * COSTS.draft_step
    text.now += COSTS.verify_seconds(4) + drafting
    text.policy.emitted(2, 3, 3, 0, drafting)
    after, _ = text.policy.thresholds()
    np.testing.assert_allclose(after, before, rtol=0.1)


def test_the_first_draft_after_a_rest_says_nothing_of_what_drafts_take() -> None:
    """It catches up on what the stream has not read, and reads weights that have left the caches.
    Texts that drafts do not suit make them rest; then come texts that they do suit.
    """
    share = []
    for seed in range(16):
        text = Text(
            0.0, 0.0, share=0.0, seed=seed, expected=CARD, times_drafts=True, dear_after_rest=True
        )
        for own in [0.05] * 8 + [0.5] * 6:
            text.policy.pause()
            text.own, text.streamed, text.behind, text.rested = own, 0, 80, 9
            for _ in range(60):
                text.step()
        share.append(text.streamed / 60)
    assert np.mean(share) > 0.7


def test_an_untrained_accelerators_card_is_believed_too() -> None:
    text = Text(0.0, 0.0, share=0.0, expected=(0.02, 0.02))
    text.speed(100)
    assert text.streamed < 8


@pytest.mark.parametrize(("dear", "drafts"), [(1.0, True), (12.0, False)])
def test_a_batch_drafts_where_its_own_steps_are_timed_to_pay(dear: float, drafts: bool) -> None:
    """Costs are measured of one sequence; of four, drafting may be another matter."""
    now, streamed, sequences = 0.0, 0, 4
    policy = BudgetPolicy(COSTS, NODES, clock=lambda: now)
    rng = np.random.default_rng(0)
    for _ in range(200):
        policy.thresholds(sequences)
        stream = policy.choose([(0, 0)] * sequences).own
        streamed += stream
        levels = 2 if stream else 0
        accepted = [int(np.cumprod(rng.random(levels) < 0.8).sum()) for _ in range(sequences)]
        for count in accepted:
            policy.emitted(1 + count, levels, levels)
        # a slow machine, too: only what the two kinds of steps take beside each other matters
        drafting = dear * (COSTS.draft_fixed + levels * COSTS.draft_step) if stream else 0.0
        now += 2 * (COSTS.verify_seconds(sequences * (1 + levels)) + drafting)
    assert streamed > 150 if drafts else streamed < 40


def test_continuations_rest_after_short_matches_that_never_held() -> None:
    """Of drafts that continue the text, as prompt lookup's, those after long matches go on."""
    now, drafted = 0.0, [0, 0]
    policy = BudgetPolicy(COSTS, NODES, clock=lambda: now, longest=3)
    for step in range(200):
        long = step % 2
        policy.thresholds()
        stream = policy.choose([(3 if long else 1, 0)]).own
        drafted[long] += stream
        policy.emitted(
            1 + (4 if long and stream else 0), NODES * stream, NODES * stream, 3 if long else 1
        )
        now += COSTS.verify_seconds(1 + NODES * stream)
    assert drafted[1] > 80 and drafted[0] < 20


def test_steps_whose_drafts_are_forced_tell_nothing_of_own_drafts() -> None:
    """Their drafts are free and all accepted; own ones beside them stay what they are: useless."""
    now, own = 0.0, [0, 0]
    policy = BudgetPolicy(COSTS, NODES, clock=lambda: now)
    for step in range(600):
        forced = step % 2 == 0
        policy.thresholds()
        stream = policy.choose([(0, 0)], own=not forced).own
        own[forced] += stream
        nodes = NODES if forced or stream else 0
        policy.emitted(1 + NODES * forced, stream, nodes, own=not forced)
        drafting = COSTS.draft_fixed + COSTS.draft_step if stream else 0.0
        now += COSTS.verify_seconds(1 + nodes) + drafting
    assert not own[True] and own[False] < 60


def test_what_a_row_takes_in_a_batch_is_told_by_neighbouring_steps() -> None:
    """Attention to growing contexts adds to all steps, but not to the price of a row."""
    pace, row, plain = BatchPace(4.0, (1.0, 1.0)), 0.4, 4.0
    rng = np.random.default_rng(0)
    for step in range(400):
        rows = row * float(rng.integers(0, 4))
        pace.observe(1.5 * plain + 0.02 * step + 1.8 * rows, plain, rows, None)
    assert pace.row == pytest.approx(1.8, rel=0.1)
    assert pace.seconds(plain, row, None) - pace.seconds(plain, 0.0, None) == pytest.approx(
        1.8 * row, rel=0.1
    )


def test_a_stalled_step_does_not_price_rows_for_long() -> None:
    """Even if no row is drafted afterwards."""
    pace = SinglePace(1.0)
    for _ in range(20):
        pace.observe(1.0, 1.0, 0.0, None)
    pace.observe(3.0, 1.0, 0.1, None)
    stalled = pace.row
    for _ in range(400):
        pace.observe(1.0, 1.0, 0.0, None)
    assert stalled > 2 and pace.row < 1.5


@pytest.mark.parametrize("rows", [7, 8])
def test_rows_that_hardly_vary_leave_the_paces_within_their_limits(rows: int) -> None:
    """The slope of noise says nothing of a step without rows."""
    pace, rng = SinglePace(1.0), np.random.default_rng(0)
    for _ in range(2000):
        drafted = 0.1 * (rows + int(rng.integers(0, 2)))
        pace.observe(float(1 + drafted) * float(rng.uniform(0.8, 1.2)), 1.0, drafted, None)
        assert pace.seconds(1.0, drafted, None) == pytest.approx(1 + drafted, rel=0.5)


def test_a_batch_whose_every_step_could_copy_text_is_timed_without_drafts_first() -> None:
    policy, now = BudgetPolicy(COSTS, NODES, ContinuationRates(4), clock=lambda: now), 0.0
    plans = []
    for _ in range(4):
        policy.thresholds(4)
        plans.append(policy.choose([(4, NODES)] * 4))
        for _ in range(4):
            policy.emitted(1)
        now += COSTS.verify_seconds(4)
    assert [plan.text for plan in plans[:2]] == [(0,) * 4] * 2
    assert plans[3].own or any(plans[3].text)


def test_a_trial_of_own_drafts_is_not_cut_short_by_steps_without() -> None:
    """The first step after a pause tells nothing of what drafts take; the second one does."""
    now = 0.0
    policy = BudgetPolicy(COSTS, NODES, clock=lambda: now)
    before, tried = False, [0, 0]
    for _ in range(3000):
        policy.thresholds(4, refilled=True)
        own = False
        if not policy.skips_drafts():
            own = policy.choose([(0, 0)] * 4).own
            for _ in range(4):
                policy.emitted(1, own, NODES * own)
        tried[0] += own and not before
        tried[1] += own and before
        before = own
        now += COSTS.verify_seconds(4 * (1 + NODES * own))
    assert tried[0] > 2 and tried[1] >= tried[0]


def test_a_batch_whose_drafts_bring_nothing_seldom_looks_for_them() -> None:
    now, looked = 0.0, [0, 0]
    policy = BudgetPolicy(COSTS, NODES, ContinuationRates(8), clock=lambda: now)
    for step in range(1200):
        late = step >= 600  # from here on all sequences repeat what they had
        policy.thresholds(8, refilled=True)
        now += COSTS.verify_seconds(8)
        if policy.skips_drafts():
            continue
        looked[late] += 1
        policy.choose([(8 if late else 0, NODES)] * 8, own=False)
        for _ in range(8):
            policy.emitted(1, own=False)
    assert looked[0] < 150, "it goes without for longer and longer"
    assert looked[1] > 500, "and looks again once drafts are worth it"


def test_a_step_before_an_interruption_is_timed_and_the_interruption_is_not() -> None:
    """A server reads a prompt's piece between most of its steps."""
    now, prices = 0.0, []
    policy = BudgetPolicy(COSTS, NODES, clock=lambda: now)
    for _ in range(300):
        prices.append(policy.thresholds(4, refilled=True)[1][0])
        policy.choose([(0, 0)] * 4, own=False)
        for _ in range(4):
            policy.emitted(1, own=False)
        now += COSTS.verify_seconds(4)
        policy.interrupted()
        now += 20 * COSTS.verify_seconds(4)
    row = COSTS.verify_seconds(8) - COSTS.verify_seconds(4)
    assert prices[-1] == pytest.approx(row / COSTS.verify_seconds(4), rel=0.3)
