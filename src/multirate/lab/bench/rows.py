"""What a run comes to: total tokens over total time, and whether answers are the same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from multirate.lab.bench.divergence import Divergence, Judge
from multirate.lab.bench.prompts import Prompt
from multirate.lab.bench.runner import Measurements, Sample
from multirate.lab.calibration.measure import Verdict
from multirate.lab.calibration.repetition import share_in_loops
from multirate.methods.spec import PLAIN

REFERENCES = ("generate", PLAIN)
"""transformers' own loop, and our plain decoding, whose answers the others are compared with."""


@dataclass
class Row:
    """One method's figures. Rates are tokens per second of wall time, prefill included.

    The repeat with the (lower) median rate gives `tokens`, `seconds` and `tokens_per_second`;
    `spread` is (max − min) / median of the rates; `speedup` is against the faster reference and
    None when answers are missing, shortened or wrong. `tokens_per_step` counts emitted tokens per
    target pass after the prefill, bonus token included; `acceptance` is accepted over drafted
    tokens.
    `identical + near_ties + diverged` is the number of prompts of a lossless method. `kept`, of a
    lossy one, is its quality: the share of its answers' tokens that are what the full model says
    after the same text, the mean over the prompts; `perplexity`, of PLAIN and lossy ones, is that
    of the answers under the full model; `repeats`, the share of the answers' tokens that only
    repeat what stands right before (lab/calibration/repetition.py). `scores`, of a suite that is a
    task, are its answers' scores, and `score_kept` the share of PLAIN's that they keep.
    `decode_tokens_per_second` is without the prefills, None where they are not told apart;
    `prefill_seconds` is what these took in the repeat of `seconds`, `split` where the other seconds
    of that repeat went (TimeSplit; None: unknown), and `steps` its target passes. `tried_at` and
    `accepted_at` count drafted tokens by their place in a draft, over all repeats. `categories` has
    the rate of each category of questions. `note` is the method's.
    """

    method: str
    lossless: bool
    tokens: int
    seconds: float
    tokens_per_second: float
    speedup: float | None
    spread: float
    tokens_per_step: float | None
    acceptance: float | None
    identical: int
    near_ties: int
    diverged: int
    seconds_per_repeat: list[float] = field(default_factory=list)
    divergences: list[dict[str, Any]] = field(default_factory=list)
    decode_tokens_per_second: float | None = None
    note: str | None = None
    kept: float | None = None
    perplexity: float | None = None
    repeats: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)
    score_kept: float | None = None
    prefill_seconds: float | None = None
    split: dict[str, float] | None = None
    steps: int = 0
    tried_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    categories: dict[str, float] = field(default_factory=dict)

    @property
    def quality(self) -> float | None:
        """The share of the full model's quality that the answers have: of its score on a task, else
        of its tokens; 1 for lossless methods, None where it was not measured.
        """
        if self.lossless:
            return 1.0
        return self.kept if self.score_kept is None else self.score_kept


@dataclass(frozen=True)
class Scoring:
    """scores(answers' tokens by the prompt's id) → scores by metric; metric: the one of quality."""

    metric: str
    scores: Callable[[dict[str, list[int]]], dict[str, float]]


def summarise(
    measurements: Measurements,
    judge: Judge,
    lossy: Sequence[str] = (),
    full_model: Callable[[Sequence[int], Sequence[int]], Verdict] | None = None,
    scoring: Scoring | None = None,
    on_row: Callable[[], None] = lambda: None,
) -> list[Row]:
    """One Row per method, in the order given; identity is against the first repeat of PLAIN,
    prompt by prompt. scoring: of the first repeat's answers, where the suite is a task.

    full_model(prompt, answer): what it says of an answer's tokens, for the quality that lossy
    methods kept; None: it is not measured. on_row: called whenever a row has been judged.
    """
    repeats = measurements.usable()
    if not repeats:
        return []
    rows = []
    for name in measurements.methods:
        row = _row(name, name not in lossy, repeats, measurements.prompts, judge)
        if full_model is not None and (name == PLAIN or not row.lossless):
            _judge(row, repeats[0], measurements.prompts, full_model)
        rows.append(row)
        on_row()
    reference = reference_row(rows)
    for row in rows:
        row.note = measurements.notes.get(row.method)
        if reference is not None and not row.diverged and row.tokens_per_second > 0:
            row.speedup = row.tokens_per_second / reference.tokens_per_second
    if scoring is not None:
        _score(rows, repeats[0], measurements.prompts, scoring)
    return rows


def _score(
    rows: Sequence[Row],
    repeat: list[dict[str, Sample]],
    prompts: Sequence[Prompt],
    scoring: Scoring,
) -> None:
    for row in rows:
        answers = {
            prompt.id: taken[row.method].answer.tokens
            for prompt, taken in zip(prompts, repeat, strict=False)
        }
        row.scores = scoring.scores(answers)
    full = next(row.scores[scoring.metric] for row in rows if row.method == PLAIN)
    for row in rows:
        row.score_kept = row.scores[scoring.metric] / full if full > 0 else None


def _judge(
    row: Row,
    repeat: list[dict[str, Sample]],
    prompts: Sequence[Prompt],
    full_model: Callable[[Sequence[int], Sequence[int]], Verdict],
) -> None:
    verdicts = [
        full_model(prompt.tokens, taken[row.method].answer.tokens)
        for prompt, taken in zip(prompts, repeat, strict=False)
    ]
    tokens = sum(verdict.tokens for verdict in verdicts)
    row.perplexity = math.exp(sum(verdict.nats for verdict in verdicts) / max(1, tokens))
    if not row.lossless:
        shares = [1 - verdict.differing / max(1, verdict.tokens) for verdict in verdicts]
        row.kept = sum(shares) / len(shares)


def reference_row(rows: Sequence[Row]) -> Row | None:
    """The faster of our own plain decoding and transformers' `generate`: what speedups are quoted
    against.
    """
    plain = [
        row
        for row in rows
        if row.method in REFERENCES and not row.diverged and row.tokens_per_second > 0
    ]
    return max(plain, key=lambda row: row.tokens_per_second, default=None)


def _row(
    name: str,
    lossless: bool,
    repeats: list[list[dict[str, Sample]]],
    prompts: Sequence[Prompt],
    judge: Judge,
) -> Row:
    taken = [[samples[name] for samples in repeat] for repeat in repeats]
    tokens = [sum(len(one.answer.tokens) for one in repeat) for repeat in taken]
    seconds = [sum(one.seconds for one in repeat) for repeat in taken]
    rates = [count / time for count, time in zip(tokens, seconds, strict=True)]
    middle = sorted(range(len(rates)), key=lambda index: rates[index])[(len(rates) - 1) // 2]
    median = [one.answer for one in taken[middle]]
    answers = [one.answer for repeat in taken for one in repeat]
    steps = sum(answer.steps for answer in answers)
    stepped = sum(answer.stepped for answer in answers)
    drafted = sum(answer.drafted for answer in answers)
    prefills = [answer.prefill_seconds for answer in answers if answer.prefill_seconds is not None]
    told_apart = len(prefills) == len(answers)
    decoding = sum(seconds) - sum(prefills) if told_apart else None
    found = _divergences(name, lossless, repeats, prompts, judge)
    differing = {index for index, _ in found}
    # A lossy method may answer otherwise, but it has to answer.
    wrong = {
        index
        for index, divergence in found
        if (
            divergence.kind == "bug"
            if lossless
            else not all(len(repeat[index].answer.tokens) for repeat in taken)
        )
    }
    splits = [answer.split for answer in median if answer.split is not None]
    return Row(
        method=name,
        lossless=lossless,
        tokens=tokens[middle],
        seconds=seconds[middle],
        tokens_per_second=rates[middle],
        speedup=None,
        spread=(max(rates) - min(rates)) / rates[middle] if rates[middle] > 0 else 0.0,
        tokens_per_step=stepped / steps if steps else None,
        acceptance=sum(answer.accepted for answer in answers) / drafted if drafted else None,
        identical=len(taken[0]) - len(differing),
        near_ties=len(differing - wrong) if lossless else 0,
        diverged=len(wrong),
        seconds_per_repeat=seconds,
        divergences=[{"prompt": prompts[index].id, **asdict(one)} for index, one in found],
        decode_tokens_per_second=stepped / decoding if decoding else None,
        prefill_seconds=sum(a.prefill_seconds or 0.0 for a in median) if told_apart else None,
        split=asdict(sum(splits[1:], splits[0])) if splits else None,
        steps=sum(answer.steps for answer in median),
        tried_at=_summed(answer.tried_at for answer in answers),
        accepted_at=_summed(answer.accepted_at for answer in answers),
        categories=_rates_of_categories(taken[middle], prompts),
        repeats=share_in_loops([one.answer.tokens for one in taken[0]]),
    )


def _summed(counts: Iterable[list[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def _rates_of_categories(taken: Sequence[Sample], prompts: Sequence[Prompt]) -> dict[str, float]:
    """Tokens per second of the questions of each category, where they have one."""
    tokens: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for prompt, sample in zip(prompts, taken, strict=False):
        if prompt.category is not None:
            tokens[prompt.category] += len(sample.answer.tokens)
            seconds[prompt.category] = seconds.get(prompt.category, 0.0) + sample.seconds
    return {category: tokens[category] / seconds[category] for category in sorted(tokens)}


def _divergences(
    name: str,
    lossless: bool,
    repeats: list[list[dict[str, Sample]]],
    prompts: Sequence[Prompt],
    judge: Judge,
) -> list[tuple[int, Divergence]]:
    """(prompt index, divergence) of every distinct answer, over all repeats, that is not the
    reference's.
    """
    found = []
    for index in range(len(repeats[0])):
        reference = repeats[0][index][PLAIN].answer.tokens
        for tokens in sorted({tuple(repeat[index][name].answer.tokens) for repeat in repeats}):
            prompt = prompts[index].tokens
            divergence = judge.classify(prompt, reference, tokens, lossless)
            if divergence is not None:
                found.append((index, divergence))
    return found
