"""A run of `multirate bench`: measures methods on prompts, and prints what it finds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multirate.cli import options
from multirate.cli.errors import FAILED, INTERRUPTED, WRONG_ANSWERS
from multirate.cli.progress import Bar
from multirate.errors import UserError

if TYPE_CHECKING:
    from multirate.decoding.logits import SamplingSettings
    from multirate.engine import Engine
    from multirate.lab.bench.prompts import Prompt, PromptSet
    from multirate.lab.bench.rows import Row, Scoring
    from multirate.lab.bench.runner import Measurements, MethodRun
    from multirate.lab.bench.suites import Question
    from multirate.lab.evaluation.task_suite import TaskSuite


@dataclass(frozen=True)
class BenchMachine(options.Machine):
    """In bfloat16, so that all methods can be compared."""

    dtype: options.Dtype = "bfloat16"


@dataclass(frozen=True)
class Measuring:
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Maximum number of tokens per answer.")
    ] = 256
    repeats: Annotated[int, typer.Option(help="Measured repeats of all prompts.")] = 3
    warmup: Annotated[int, options.measured(help="Prompts answered before measuring starts.")] = 1
    batch: Annotated[int, options.measured(help="Prompts answered at once.")] = 1
    truncate: Annotated[
        bool,
        options.measured("--truncate", help="Cut long prompts from the left (default: skip them)."),
    ] = False
    leave_out_loops: Annotated[
        bool,
        options.measured(
            "--leave-out-loops",
            help="Leave out prompts whose answers repeat in loops, because loops make every "
            "method look fast.",
        ),
    ] = False

    def __post_init__(self) -> None:
        for name, least in (("repeats", 1), ("warmup", 0), ("max_new_tokens", 1), ("batch", 1)):
            if getattr(self, name) < least:
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option} is {getattr(self, name)}: at least {least} is needed")
        if self.leave_out_loops and self.batch > 1:
            raise UserError(
                f"--leave-out-loops needs one prompt at a time: leave out --batch {self.batch}"
            )


@dataclass(frozen=True)
class Run:
    content: dict[str, Any]
    """Its JSON."""
    rows: list[Row]
    measurements: Measurements

    def end(self) -> None:
        """Ends the command with the exit code of wrong answers, an interruption or a failure."""
        if any(row.diverged for row in self.rows):
            raise typer.Exit(WRONG_ANSWERS)
        if self.measurements.interrupted:
            options.note("interrupted: the results cover the finished part")
            raise typer.Exit(INTERRUPTED)
        if self.measurements.failed:
            raise typer.Exit(FAILED)


def run(
    engine: Engine,
    questions: list[Question],
    names: list[str],
    how: Measuring,
    baselines: dict[str, str | None] | None = None,
    *,
    title: str = "",
    settings: dict[str, Any] | None = None,
    sampling: SamplingSettings | None = None,
    optional: Sequence[str] = (),
    tasks: TaskSuite | None = None,
    show: Callable[[Sequence[Row]], None] | None = None,
) -> Run:
    """Measures and prints the table.

    settings: of the run, for its JSON. optional: names to leave out, with the reason, if they
    cannot run. tasks: the task that the questions are from; its answers are scored. show: prints
    the rows instead of the usual tables.
    """
    from multirate.lab.bench import bandwidth, report
    from multirate.lab.bench.seen_prompts import seen_prompts, warnings_of

    seen = seen_prompts(engine.accelerators, questions)
    for warning in warnings_of(seen):
        options.note(f"warning: {warning}")
    method_runs, unavailable = _method_runs(engine, names, optional, how.max_new_tokens, sampling)
    prompts = prepared(engine, questions, how.max_new_tokens, how.truncate)
    with ExitStack() as stack:
        model = (settings or {}).get("model", "")
        theirs, missing = _baselines(engine, baselines or {}, model, prompts.prompts, how, stack)
        method_runs, unavailable = [*method_runs, *theirs], [*unavailable, *missing]
        for one in unavailable:
            options.note(f"note: no row for {one['method']}: {one['reason']}")
        measurements, others_used = _measured(engine, method_runs, prompts.prompts, how)
    unavailable += [{"method": name, "reason": why} for name, why in measurements.ended.items()]
    loops: list[str] | None = None
    if how.leave_out_loops:
        answered = max(map(len, measurements.samples), default=0)
        measurements, loops = measurements.without_loops()
        options.note(f"note: left out {len(loops)} of {answered} answers that repeat in loops")
    rows = _checked(engine, measurements, method_runs, tasks)
    read = bandwidth.read_bandwidth(engine.decoder.info.device)
    weights = bandwidth.bytes_per_step(engine.model, engine.decoder)
    share = bandwidth.share_of(read, weights, rows, how.batch)
    if not rows:
        looped = loops and not measurements.prompts
        unfinished = "the run ended before every method had answered one prompt"
        reason = "all answers repeat in loops" if looped else unfinished
        options.console().print(f"Nothing was measured: {reason}.")
    elif show is not None:
        show(rows)
    else:
        scores = [] if tasks is None else [report.score_table(rows)]
        for part in (report.table(rows, title), *scores, report.bandwidth_line(read, share)):
            options.console().print(part)
    usable = measurements.usable()
    content = _content(
        engine,
        rows,
        how,
        **(settings or {}),
        read_bandwidth_bytes_per_second=read,
        plain_share_of_bandwidth=share,
        other_processes_used=round(others_used, 2),
        prompts=len(usable[0]) if usable else 0,
        repeats=len(usable),
        skipped=prompts.skipped,
        truncated=prompts.truncated,
        loops=loops,
        interrupted=measurements.interrupted,
        unavailable=unavailable,
        trained_on_questions=seen,
    )
    return Run(content, rows, measurements)


def _checked(
    engine: Engine,
    measurements: Measurements,
    method_runs: Sequence[MethodRun],
    tasks: TaskSuite | None,
) -> list[Row]:
    """The rows, with every answer compared."""
    from multirate.lab.bench.divergence import Judge
    from multirate.lab.bench.rows import summarise
    from multirate.lab.calibration.measure import full_model_on

    with Bar("checking answers", len(method_runs)) as bar:
        return summarise(
            measurements,
            Judge(engine.model),
            [one.name for one in method_runs if not one.lossless],
            lambda prompt, tokens: full_model_on(engine.decoder, prompt, tokens),
            None if tasks is None else _scoring(tasks, engine.tokenizer),
            on_row=bar.advance,
        )


def _content(
    engine: Engine,
    rows: Sequence[Row],
    how: Measuring,
    **more: Any,
) -> dict[str, Any]:
    from multirate import provenance
    from multirate.lab.bench import report
    from multirate.lab.bench.predicted import predictions, trained

    return report.document(
        provenance.collect(engine.decoder.info.device, backend=engine.backend),
        rows,
        **more,
        max_new_tokens=how.max_new_tokens,
        batch=how.batch,
        warmup=how.warmup,
        tuned=engine.tuned_settings,
        predicted=predictions(engine, rows) if how.batch == 1 else {},
        accelerators={
            name: about
            for name, accelerator in engine.accelerators.items()
            if (about := trained(accelerator)) is not None
        },
    )


def prepared(
    engine: Engine, questions: list[Question], max_new_tokens: int, truncate: bool
) -> PromptSet:
    """The prompts of all questions. Prints which are skipped or cut."""
    from multirate.decoding.logits import SamplingSettings
    from multirate.lab.bench.prompts import build_prompts
    from multirate.methods.spec import PLAIN

    greedy, stop = SamplingSettings(), engine.stopping(max_new_tokens, ())
    options.note_left_out(engine, " with every method")
    with Bar("preparing prompts", len(questions)) as bar:
        prompts = build_prompts(
            questions,
            engine.tokenizer,
            lambda ids: engine.generate([ids], greedy, stop, PLAIN).sequences[0],
            max_positions=engine.decoder.info.max_positions,
            max_new_tokens=max_new_tokens,
            truncate=truncate,
            on_question=bar.advance,
        )
    if prompts.skipped:
        options.note(
            f"note: skipped {_some(prompts.skipped)}, too long for the context with "
            f"{max_new_tokens} new tokens (--truncate cuts long prompts instead)"
        )
    if prompts.truncated:
        options.note(f"note: cut {_some(prompts.truncated)} from the left, to fit the context")
    return prompts


def _some(names: list[str]) -> str:
    """How many prompts, and the first of them."""
    first = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
    return f"{len(names)} prompt{'s' * (len(names) != 1)} ({first})"


def _method_runs(
    engine: Engine,
    names: Sequence[str],
    optional: Sequence[str],
    max_new_tokens: int,
    sampling: SamplingSettings | None,
) -> tuple[list[MethodRun], list[dict[str, str]]]:
    """(the methods' runs, {"method", "reason"} of those that cannot be measured)."""
    from multirate.lab.bench.method_runs import method_run
    from multirate.lab.bench.runner import Unavailable

    found: list[MethodRun] = []
    unavailable: list[dict[str, str]] = []
    for name in names:
        try:
            found.append(method_run(engine, name, max_new_tokens, sampling=sampling))
        except (Unavailable, UserError) as error:
            if isinstance(error, UserError) and name not in optional:
                raise
            unavailable.append({"method": name, "reason": str(error)})
    return found, unavailable


def _baselines(
    engine: Engine,
    baselines: dict[str, str | None],
    model: str,
    prompts: Sequence[Prompt],
    how: Measuring,
    stack: ExitStack,
) -> tuple[list[MethodRun], list[dict[str, str]]]:
    import torch

    from multirate.lab.bench.baselines import Contest, prepare

    positions = max(len(prompt.tokens) for prompt in prompts) + how.max_new_tokens
    threads = torch.get_num_threads()

    def contest(argument: str | None) -> Contest:
        return Contest(engine, model, argument, how.max_new_tokens, positions, threads, stack)

    return prepare(baselines, contest)


def _measured(
    engine: Engine, method_runs: Sequence[MethodRun], prompts: Sequence[Prompt], how: Measuring
) -> tuple[Measurements, float]:
    """(the measurements, how many processors other processes kept busy meanwhile)."""
    import torch

    from multirate.lab.bench.other_processes import NOTABLE, OtherProcesses
    from multirate.lab.bench.runner import batches, measure

    device = engine.decoder.info.device
    groups = len(batches(prompts, how.batch))
    count = how.repeats * groups + min(how.warmup, groups)
    with Bar("measuring", count * len(method_runs)) as bar:
        others = OtherProcesses()
        measurements = measure(
            method_runs,
            prompts,
            repeats=how.repeats,
            warmup=how.warmup,
            batch=how.batch,
            synchronize=(lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None,
            on_answer=lambda name: bar.advance(),
        )
        others_used = others.processors()
    if others_used > NOTABLE:
        options.note(
            f"note: other processes used {others_used:.1f} of {os.cpu_count()} processors during "
            "the measurement, so speeds are uncertain"
        )
    for name, why in measurements.ended.items():
        options.note(f"note: no row for {name}: {why}")
    for traceback in measurements.failed.values():
        typer.echo(traceback, err=True)
    return measurements, others_used


def _scoring(tasks: TaskSuite, tokenizer: Any) -> Scoring:
    """Scores answers that are given as tokens."""
    from multirate.lab.bench.rows import Scoring

    def scores(answers: dict[str, list[int]]) -> dict[str, float]:
        decode = tokenizer.decode
        texts = {name: decode(ids, skip_special_tokens=True) for name, ids in answers.items()}
        return tasks.scores(texts)

    return Scoring(tasks.metric, scores)
