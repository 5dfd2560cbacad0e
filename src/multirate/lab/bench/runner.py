"""Measures methods: warm-up, then interleaved repeats."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from time import perf_counter
from traceback import format_exc

from multirate.errors import UserError, first_line
from multirate.lab.bench.prompts import Prompt
from multirate.lab.calibration.repetition import MOST_LOOPING, share_in_loops
from multirate.methods.spec import PLAIN
from multirate.runtime.time_split import TimeSplit


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
