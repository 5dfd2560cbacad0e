"""Measures and compares methods: warm-up, interleaved repeats, total tokens over total time, and
whether answers are the same.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import zip_longest
from time import perf_counter
from traceback import format_exc
from typing import Any

from multirate.errors import UserError, first_line
from multirate.lab.bench.divergence import Divergence, Judge
from multirate.lab.bench.prompts import Prompt
from multirate.lab.calibration.measure import Verdict
from multirate.lab.calibration.repetition import MOST_LOOPING, share_in_loops
from multirate.methods.spec import PLAIN
from multirate.runtime.time_split import TimeSplit

REFERENCES = ("generate", PLAIN)
"""transformers' own loop, and our plain decoding, whose answers the others are compared with."""


@dataclass(frozen=True)
class Answer:
    """New tokens of one prompt and what they took: `stepped` of them came from `steps` passes after
    the prefill.

    `drafted` counts drafted levels (of a chain: tokens), `accepted` the drafted tokens that were
    emitted; `tried_at` and `accepted_at` count by a token's place in its draft (DecodeStats).
    split: where the seconds after the prefill went; None: unknown.
    """

    tokens: list[int]
    stepped: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    tried_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    prefill_seconds: float | None = None
    split: TimeSplit | None = None


class Unavailable(Exception):
    """A row that cannot be measured here, and why, in a sentence."""


@dataclass(frozen=True)
class MethodRun:
    """A method under test: `run(prompt ids) -> Answer`. Lossy methods may give other tokens.

    run_batch: answers several prompts at once. The first answer holds the counts of the whole
    batch. None: the method takes one prompt at a time.
    forget: called, untimed, before a prompt that does not continue the one before, so that no
    method has seen it.
    run_for: for another engine, whose text may differ. run_for(prompt ids, count) runs after PLAIN,
    answers with exactly as many tokens, and is timed instead of `run`.
    note: a note for the row, such as a version.
    """

    name: str
    run: Callable[[list[int]], Answer]
    lossless: bool = True
    forget: Callable[[], None] = lambda: None
    run_for: Callable[[list[int], int], Answer] | None = None
    note: str | None = None
    run_batch: Callable[[list[list[int]]], list[Answer]] | None = None

    def answers(self, prompts: list[list[int]]) -> list[Answer]:
        """Of one prompt, or of a batch."""
        if len(prompts) == 1 or self.run_batch is None:
            return [self.run(prompt) for prompt in prompts]
        return self.run_batch(prompts)


@dataclass(frozen=True)
class Sample:
    """One answer and the time that it took: of a batch, each answer has an equal share."""

    answer: Answer
    seconds: float


@dataclass
class Measurements:
    """`samples[repeat][prompt][method]`; every method has answered every prompt that is in it.
    ended: methods that could not go on, and why; they are in nothing else here. failed: those of
    them that raised an error which nobody expects, and its traceback.
    """

    methods: list[str]
    prompts: list[Prompt]
    samples: list[list[dict[str, Sample]]] = field(default_factory=list)
    interrupted: bool = False
    notes: dict[str, str] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def usable(self) -> list[list[dict[str, Sample]]]:
        """The complete repeats; if an interruption left none, what there is of the first one."""
        begun = [repeat for repeat in self.samples if repeat]
        return [repeat for repeat in begun if len(repeat) == len(self.prompts)] or begun[:1]

    def leave_out(self, method: str, why: str) -> None:
        """The method has ended."""
        self.ended[method] = why
        self.methods.remove(method)
        self.notes.pop(method, None)
        for repeat in self.samples:
            for taken in repeat:
                taken.pop(method, None)

    def without_loops(self) -> tuple[Measurements, list[str]]:
        """Without the prompts whose answer by PLAIN has more than MOST_LOOPING of its tokens in
        loops, and these prompts' ids: speculation on text that repeats itself is no speedup.
        """
        looping = {
            index
            for index, taken in enumerate((self.usable() or [[]])[0])
            if share_in_loops([taken[PLAIN].answer.tokens]) > MOST_LOOPING
        }
        kept = [index for index in range(len(self.prompts)) if index not in looping]
        counted = replace(
            self,
            prompts=[self.prompts[index] for index in kept],
            samples=[[repeat[i] for i in kept if i < len(repeat)] for repeat in self.samples],
        )
        return counted, [self.prompts[index].id for index in sorted(looping)]


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

    def as_dict(self) -> dict[str, Any]:
        """The fields, JSON-ready."""
        return asdict(self)

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


def measure(
    method_runs: Sequence[MethodRun],
    prompts: Sequence[Prompt],
    *,
    repeats: int = 3,
    warmup: int = 1,
    batch: int = 1,
    synchronize: Callable[[], None] | None = None,
    on_answer: Callable[[str], None] | None = None,
) -> Measurements:
    """Times every method on every prompt, `repeats` times, after `warmup` prompts that do not
    count.

    All methods answer one prompt before the next prompt starts, and their order rotates, so that
    changes of the machine's speed affect all of them. batch: prompts answered at once (`batches`).
    In a conversation, later turns may use what a method kept of earlier ones. Every other prompt is
    new to it. Ctrl-C ends the run and keeps the finished part. A method that raises Unavailable or
    fails is left out, with its earlier answers; the others continue. A UserError, or a failure of
    PLAIN, ends the run.
    """
    groups = batches(prompts, batch)
    result = Measurements(
        [c.name for c in method_runs],
        [prompt for group in groups for prompt in group],
        notes={c.name: c.note for c in method_runs if c.note is not None},
    )
    wait = synchronize or (lambda: None)
    tell = on_answer or (lambda name: None)
    running = list(method_runs)

    def answered(method_run: MethodRun, answer: Callable[[], list[Answer]]) -> list[Answer]:
        """None of a method that has just ended."""
        try:
            answers = answer()
        except Unavailable as error:
            why = str(error)
        except UserError:
            raise
        except Exception as error:
            if method_run.name == PLAIN:
                raise
            result.failed[method_run.name] = format_exc()
            why = f"it raised an error ({first_line(error)})"
        else:
            return answers
        finally:
            tell(method_run.name)
        running.remove(method_run)
        result.leave_out(method_run.name, why)
        return []

    gc.collect()
    gc.freeze()  # a full collection among a model's many objects takes longer than some answers
    try:
        for group in groups[:warmup]:
            _forget(running, group)
            for method_run in tuple(running):
                answered(method_run, partial(method_run.answers, [p.tokens for p in group]))
        for repeat in range(repeats):
            result.samples.append([])
            for index, group in enumerate(groups):
                taken: list[dict[str, Sample]] = [{} for _ in group]
                _forget(running, group)
                for method_run in _order(running, repeat + index):
                    wait()
                    start = perf_counter()
                    answers = answered(method_run, partial(_answers, method_run, group, taken))
                    wait()
                    share = (perf_counter() - start) / len(group)
                    for own, answer in zip(taken, answers, strict=False):
                        own[method_run.name] = Sample(answer, share)
                result.samples[repeat].extend(taken)
    except KeyboardInterrupt:
        result.interrupted = True
    finally:
        gc.unfreeze()
    return result


def _answers(
    method_run: MethodRun, group: Sequence[Prompt], taken: Sequence[dict[str, Sample]]
) -> list[Answer]:
    """`taken`: PLAIN's answers, for a method that answers as long as it did."""
    if method_run.run_for is None:
        return method_run.answers([prompt.tokens for prompt in group])
    return [
        method_run.run_for(prompt.tokens, len(own[PLAIN].answer.tokens))
        for prompt, own in zip(group, taken, strict=True)
    ]


def batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Prompts that are answered at once: of `size` conversations the first turns, then those that
    follow, and so on with the next conversations.
    """
    conversations: list[list[Prompt]] = []
    for prompt in prompts:
        if prompt.follows and conversations:
            conversations[-1].append(prompt)
        else:
            conversations.append([prompt])
    result: list[list[Prompt]] = []
    for first in range(0, len(conversations), size):
        turns = zip_longest(*conversations[first : first + size])
        result.extend([prompt for prompt in turn if prompt is not None] for turn in turns)
    return result


def _order(method_runs: Sequence[MethodRun], turn: int) -> list[MethodRun]:
    """Rotated by `turn`; those that need the reference's length after all others."""
    first = turn % len(method_runs)
    rotated = [*method_runs[first:], *method_runs[:first]]
    return sorted(rotated, key=lambda method_run: method_run.run_for is not None)


def _forget(method_runs: Sequence[MethodRun], group: Sequence[Prompt]) -> None:
    if not all(prompt.follows for prompt in group):
        for method_run in method_runs:
            method_run.forget()


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


def _split(answers: Sequence[Answer]) -> dict[str, float] | None:
    """Where their seconds went; of a batch's answers the first one has all of it."""
    known = [answer.split for answer in answers if answer.split is not None]
    return asdict(sum(known[1:], known[0])) if known else None


def _row(
    name: str,
    lossless: bool,
    repeats: list[list[dict[str, Sample]]],
    prompts: Sequence[Prompt],
    judge: Judge,
) -> Row:
    tokens = [sum(len(taken[name].answer.tokens) for taken in repeat) for repeat in repeats]
    seconds = [sum(taken[name].seconds for taken in repeat) for repeat in repeats]
    rates = [count / time for count, time in zip(tokens, seconds, strict=True)]
    middle = sorted(range(len(rates)), key=lambda index: rates[index])[(len(rates) - 1) // 2]
    answers = [taken[name].answer for repeat in repeats for taken in repeat]
    steps = sum(answer.steps for answer in answers)
    drafted = sum(answer.drafted for answer in answers)
    prefills = [answer.prefill_seconds for answer in answers]
    decoding = (
        None if None in prefills else sum(seconds) - sum(p for p in prefills if p is not None)
    )
    stepped = sum(answer.stepped for answer in answers)
    found = _divergences(name, lossless, repeats, prompts, judge)
    differing = {index for index, _ in found}
    # A lossy method may answer otherwise, but it has to answer.
    wrong = {
        index
        for index, divergence in found
        if (
            divergence.kind == "bug"
            if lossless
            else not all(len(r[index][name].answer.tokens) for r in repeats)
        )
    }
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
        identical=len(repeats[0]) - len(differing),
        near_ties=len(differing - wrong) if lossless else 0,
        diverged=len(wrong),
        seconds_per_repeat=seconds,
        divergences=[
            {"prompt": prompts[index].id, **divergence.as_dict()} for index, divergence in found
        ],
        decode_tokens_per_second=stepped / decoding if decoding else None,
        prefill_seconds=None
        if decoding is None
        else sum(taken[name].answer.prefill_seconds or 0.0 for taken in repeats[middle]),
        split=_split([taken[name].answer for taken in repeats[middle]]),
        steps=sum(taken[name].answer.steps for taken in repeats[middle]),
        tried_at=_summed(answer.tried_at for answer in answers),
        accepted_at=_summed(answer.accepted_at for answer in answers),
        categories=_rates_of_categories(name, repeats[middle], prompts),
        repeats=share_in_loops([taken[name].answer.tokens for taken in repeats[0]]),
    )


def _summed(counts: Iterable[list[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def _rates_of_categories(
    name: str, repeat: list[dict[str, Sample]], prompts: Sequence[Prompt]
) -> dict[str, float]:
    """Tokens per second of the questions of each category, where they have one."""
    tokens: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for prompt, taken in zip(prompts, repeat, strict=False):
        if prompt.category is not None:
            sample, category = taken[name], prompt.category
            tokens[category] = tokens.get(category, 0) + len(sample.answer.tokens)
            seconds[category] = seconds.get(category, 0.0) + sample.seconds
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
