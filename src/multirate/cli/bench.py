"""`multirate bench`: compares methods on the prompts of a suite."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multirate.cli import bench_experts, options
from multirate.cli.bench_prompts import prepared
from multirate.cli.errors import INTERRUPTED
from multirate.cli.progress import Bar
from multirate.errors import UserError

if TYPE_CHECKING:
    from multirate.decoding.logits import SamplingSettings
    from multirate.engine import Engine
    from multirate.lab.bench.runner import Measurements, Row, Scoring
    from multirate.lab.bench.suites import Question
    from multirate.lab.evaluation.task_suite import TaskSuite

WRONG_ANSWERS = FAILED = 1
"""Exit codes: a lossless method changed the text, or a method raised an error."""
DYNAMIC = "dynamic"
"""In --methods: dynamic modes at several settings (lab/bench/frontier.py)."""
ALL = "all"
"""In --methods: the references, every lossless method without training, and every accelerator."""


def command(
    model: options.Model = None,
    suite: Annotated[
        str,
        typer.Option(
            help="mt_bench, spec_bench, self_instruct, koala, wizardlm, gsm8k, humaneval or text; "
            "or a task, which is also scored: wikisql, e2e_nlg or dialogsum."
        ),
    ] = "mt_bench",
    data: Annotated[
        Path, typer.Option(help="The suite's .jsonl or .jsonl.gz file, or the task's data folder.")
    ] = ...,  # type: ignore[assignment]
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated names, with settings after colons, as in m2r2-carry:lookup=0 "
            "(default: generate, autoregressive and every accelerator). 'all' adds every lossless "
            "method without training, and text lookup for every drafter. 'dynamic' measures "
            "quality against speed."
        ),
    ] = None,
    accelerator: Annotated[
        list[str] | None,
        typer.Option(
            "--accelerator",
            "-a",
            help="A trained accelerator: folder, hub id or NAME=FOLDER (repeatable).",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Number of questions, spread evenly over the file (default: all)."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Maximum number of tokens per answer.")
    ] = 256,
    baselines: Annotated[
        str | None,
        options.measured(
            help="Also measure, comma-separated: llamacpp (or llamacpp=FILE.gguf), bf16 (plain "
            "decoding of a quantised model's weights expanded to bf16), assisted (transformers "
            "with prompt lookup and early exit) or assistant=MODEL (transformers with a draft "
            "model)."
        ),
    ] = None,
    task: Annotated[
        str | None, options.measured(help="Use only this category of the suite.")
    ] = None,
    temperature: Annotated[
        float,
        options.measured(help="0 is greedy; above 0 samples, with the same seed for every method."),
    ] = 0.0,
    seed: Annotated[int, options.measured(min=0, help="Random seed, with --temperature.")] = 0,
    repeats: Annotated[int, typer.Option(help="Measured repeats of all prompts.")] = 3,
    warmup: Annotated[int, options.measured(help="Prompts answered before measuring starts.")] = 1,
    batch: Annotated[int, options.measured(help="Prompts answered at once.")] = 1,
    truncate: Annotated[
        bool,
        options.measured("--truncate", help="Cut long prompts from the left (default: skip them)."),
    ] = False,
    leave_out_loops: Annotated[
        bool,
        options.measured(
            "--leave-out-loops",
            help="Leave out prompts whose answers repeat in loops, because loops make every "
            "method look fast.",
        ),
    ] = False,
    tuned: options.Tuned = True,
    dtype: options.Dtype = "bfloat16",
    weights: options.Weights = "file",
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    threads: options.Threads = None,
    json: options.Json = None,
    points: Annotated[
        int | None,
        options.measured(
            min=1, help="With --methods dynamic: thresholds measured per method (default: 6)."
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write results.json and a page, report.html, to this folder."),
    ] = None,
    experts: options.Experts = None,
    expert_memory: Annotated[
        str | None,
        options.of_experts(
            help="With --methods experts: memory budgets, such as 8MB,25% (default: 25%)."
        ),
    ] = None,
    disk_speed: Annotated[
        str | None,
        options.of_experts(
            help="With --methods experts: limit reads to this speed, such as 500MB/s."
        ),
    ] = None,
    expert_predictor: options.ExpertPredictor = None,
    page: Annotated[
        Path | None,
        options.of_experts("--html", help="With --methods experts: write a page with timelines."),
    ] = None,
) -> None:
    """Compare methods by speed, and check that their answers are the same.

    All methods answer the same prompts in turns. A method with a wrong answer gets no speedup, and
    the exit code is 1.
    """
    for name, value, least in (
        ("--repeats", repeats, 1),
        ("--warmup", warmup, 0),
        ("--max-new-tokens", max_new_tokens, 1),
        ("--batch", batch, 1),
    ):
        if value < least:
            raise UserError(f"{name} is {value}: at least {least} is needed")

    from multirate.decoding.logits import SamplingSettings
    from multirate.lab.bench.suites import READERS, load_suite
    from multirate.lab.evaluation.task_files import local_tasks
    from multirate.lab.evaluation.task_suite import is_task

    sampling = SamplingSettings(temperature, seed=None if temperature == 0 else seed)
    if baselines and not sampling.greedy:
        raise UserError("--baselines works only with greedy decoding: leave out --temperature")
    if baselines and batch > 1:
        raise UserError(f"--baselines answers one prompt at a time: leave out --batch {batch}")
    if leave_out_loops and batch > 1:
        raise UserError(f"--leave-out-loops needs one prompt at a time: leave out --batch {batch}")
    if suite not in READERS and not is_task(suite):
        known = ", ".join([*READERS, *local_tasks()])
        raise UserError(f"unknown suite {suite!r}; accepted: {known}")
    tasks = task_suite(suite, data, limit, task) if is_task(suite) else None
    questions = tasks.questions if tasks else load_suite(suite, data, limit, task)

    from multirate import provenance
    from multirate.io import check_writable, write_json
    from multirate.lab.bench.baselines import parse_baselines
    from multirate.lab.bench.report_page import check as check_report
    from multirate.lab.bench.report_page import write as write_report
    from multirate.lab.pages.page import check_installed

    beside = parse_baselines(baselines or "")
    if json is not None:
        check_writable(json, provenance.RESULTS, provenance.collected)
    if report is not None:
        check_installed()
        check_report(report)
    options.set_threads(threads)
    chosen = method_names(methods) if methods else []
    if points is not None and DYNAMIC not in chosen:
        raise UserError(f"--points {points} needs --methods {DYNAMIC}")
    with_experts = experts is not None or bench_experts.EXPERTS in chosen
    for name, given in (
        ("--expert-memory", expert_memory),
        ("--disk-speed", disk_speed),
        ("--expert-predictor", expert_predictor),
        ("--html", page),
    ):
        if given is not None and not with_experts:
            raise UserError(f"{name} {given} needs --methods {bench_experts.EXPERTS}")
    if with_experts:
        if batch > 1:
            raise UserError(
                f"--batch {batch} does not work with experts loaded from disk: leave it out"
            )
        for name, unused in (
            ("--leave-out-loops", leave_out_loops),
            ("--report (use --html FILE)", report is not None),
            ("--baselines", bool(baselines)),
            ("--temperature", not sampling.greedy),
        ):
            if unused:
                raise UserError(f"{name} does not work with experts loaded from disk: leave it out")
        same, interrupted = bench_experts.command(
            model,
            questions,
            suite,
            data,
            chosen or [bench_experts.EXPERTS],
            bench_experts.ExpertOptions(experts, expert_memory, disk_speed, page, expert_predictor),
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            truncate=truncate,
            json=json,
        )
        if not same:
            raise typer.Exit(WRONG_ANSWERS)
        if interrupted:
            options.note("interrupted: the tables above are of finished budgets")
            raise typer.Exit(INTERRUPTED)
        return

    from multirate.engine import attach
    from multirate.lab.bench import frontier
    from multirate.lab.bench.method_runs import GENERATE, GENERATE_STATIC
    from multirate.lab.bench.runner import REFERENCES
    from multirate.loading.hub import reference_accelerators
    from multirate.methods.spec import (
        PLAIN,
        dynamic_methods,
        joined_variant,
        untrained_drafters,
    )

    loaded = options.load(model, dtype, device, weights=weights)
    engine = attach(loaded.model, backend=backend, tokenizer=loaded.tokenizer)
    engine.uses_tuned = tuned
    own = reference_accelerators(model)
    wanted = chosen or list(own)
    optional: list[str] = []
    if ALL in wanted:
        optional = untrained_drafters()
        chosen = list(dict.fromkeys([*REFERENCES, *optional, *own, *chosen]))
        chosen.remove(ALL)
        wanted = chosen
    dials = DYNAMIC in wanted
    if dials:  # replaced by the methods that it stands for
        wanted = [
            *(name for name in wanted if name != DYNAMIC),
            *dynamic_methods(trained=True),
        ]
        wanted = [name for name in wanted if name in chosen or name in own]
    options.add_accelerators(engine, accelerator or [], wanted, own)
    names = wanted if methods else [*REFERENCES, *engine.accelerators]
    if optional:
        drafting = [*optional, *engine.accelerators]
        joined = (joined_variant(name, engine.spec_of(name)) for name in drafting)
        names = list(dict.fromkeys([*names, *engine.accelerators, *filter(None, joined)]))
    if dials:
        names = list(
            dict.fromkeys(
                [
                    *(n for n in names if n in chosen),
                    *frontier.settings_of(engine, points or frontier.POINTS),
                ]
            )
        )
    transformers_own = (GENERATE, GENERATE_STATIC)
    for name in names:  # fails on an unknown name before anything is packed or compiled
        if name not in transformers_own:
            engine.spec_of(name, besides=(ALL, DYNAMIC, *transformers_own))
    if PLAIN not in names:
        options.note(f"note: added {PLAIN}, the baseline for the answers")
        names = [PLAIN, *names]
    content, rows, measured = run(
        engine,
        questions,
        names,
        beside,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        warmup=warmup,
        batch=batch,
        truncate=truncate,
        leave_out_loops=leave_out_loops,
        title=f"{suite}, {loaded.name}, {dtype}, batch {batch}, "
        + ("greedy" if sampling.greedy else f"temperature {temperature:g}, seed {seed}"),
        settings={
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "weights": engine.weights,
            "model": loaded.name,
            "suite": suite,
            "data": str(data),
            "task": task,
            "seed": sampling.seed,
            **({} if sampling.greedy else {"temperature": temperature}),
        },
        sampling=sampling,
        optional=optional,
        tasks=tasks,
    )
    if dials or any(not row.lossless for row in rows if row.method in names):
        bests = frontier.frontier(rows)
        metrics = [] if tasks is None else [tasks.metric]
        options.console().print(frontier.table(bests, *metrics))
        content["frontier"] = [best.as_dict() for best in bests]
    if json is not None:
        write_json(json, content)
    if report is not None:
        typer.echo(str(write_report(report, content)))
    if any(row.diverged for row in rows):
        raise typer.Exit(WRONG_ANSWERS)
    if measured.interrupted:
        options.note("interrupted: the results cover the finished part")
        raise typer.Exit(INTERRUPTED)
    if measured.failed:
        raise typer.Exit(FAILED)


def task_suite(suite: str, data: Path, limit: int | None, category: str | None) -> TaskSuite:
    """The questions of one of this package's tasks. UserError if a category is given."""
    from multirate.lab.evaluation.task_suite import load_task_suite

    if category is not None:
        raise UserError(f"--task {category!r}: suite {suite} has no categories")
    return load_task_suite(suite, data, limit)


def scoring(tasks: TaskSuite, tokenizer: Any) -> Scoring:
    """Scores answers that are given as tokens."""
    from multirate.lab.bench.runner import Scoring

    def scores(answers: dict[str, list[int]]) -> dict[str, float]:
        decode = tokenizer.decode
        texts = {name: decode(ids, skip_special_tokens=True) for name, ids in answers.items()}
        return tasks.scores(texts)

    return Scoring(tasks.metric, scores)


def method_names(text: str) -> list[str]:
    """Splits a comma-separated list and drops repetitions. Commas in [] belong to a setting."""
    parts = re.split(r",(?![^\[\]]*\])", text)
    names = list(dict.fromkeys(name.strip() for name in parts if name.strip()))
    if not names:
        raise UserError("--methods names no method: multirate info lists them")
    return names


def run(
    engine: Engine,
    questions: list[Question],
    names: list[str],
    baselines: dict[str, str | None] | None = None,
    *,
    max_new_tokens: int,
    repeats: int,
    warmup: int,
    batch: int = 1,
    truncate: bool,
    leave_out_loops: bool = False,
    title: str,
    settings: dict[str, Any],
    sampling: SamplingSettings | None = None,
    optional: Sequence[str] = (),
    tasks: TaskSuite | None = None,
    show: Callable[[Sequence[Row]], None] | None = None,
) -> tuple[dict[str, Any], list[Row], Measurements]:
    """Measures and prints the table → (the run's JSON, its rows, their measurements).

    optional: names to leave out, with the reason, if they cannot run. tasks: the task that the
    questions are from; its answers are scored. show: prints the rows instead of the usual tables.
    """
    from contextlib import ExitStack

    import torch

    from multirate import provenance
    from multirate.lab.bench import bandwidth, report
    from multirate.lab.bench.baselines import Contest
    from multirate.lab.bench.baselines import prepare as prepare_baselines
    from multirate.lab.bench.divergence import Judge
    from multirate.lab.bench.method_runs import method_run
    from multirate.lab.bench.other_processes import NOTABLE, OtherProcesses
    from multirate.lab.bench.predicted import predictions, trained
    from multirate.lab.bench.runner import MethodRun, Unavailable, batches, measure, summarise
    from multirate.lab.bench.seen_prompts import seen_prompts, warnings_of
    from multirate.lab.calibration.measure import full_model_on

    seen = seen_prompts(engine.accelerators, questions)
    for warning in warnings_of(seen):
        options.note(f"warning: {warning}")
    method_runs: list[MethodRun] = []
    unavailable: list[dict[str, str]] = []
    for name in names:
        try:
            method_runs.append(method_run(engine, name, max_new_tokens, sampling=sampling))
        except Unavailable as error:
            unavailable.append({"method": name, "reason": str(error)})
        except UserError as error:
            if name not in optional:
                raise
            unavailable.append({"method": name, "reason": str(error)})
    prompts = prepared(engine, questions, max_new_tokens, truncate)
    groups = len(batches(prompts.prompts, batch))
    device = engine.decoder.info.device
    with ExitStack() as stack:
        positions = max(len(prompt.tokens) for prompt in prompts.prompts) + max_new_tokens
        theirs, missing = prepare_baselines(
            baselines or {},
            lambda argument: Contest(
                engine,
                settings["model"],
                argument,
                max_new_tokens,
                positions,
                torch.get_num_threads(),
                stack,
            ),
        )
        method_runs += theirs
        unavailable += missing
        for one in unavailable:
            options.note(f"note: no row for {one['method']}: {one['reason']}")
        count = repeats * groups + min(warmup, groups)
        with Bar("measuring", count * len(method_runs)) as bar:
            others = OtherProcesses()
            measurements = measure(
                method_runs,
                prompts.prompts,
                repeats=repeats,
                warmup=warmup,
                batch=batch,
                synchronize=(lambda: torch.cuda.synchronize(device))
                if device.type == "cuda"
                else None,
                on_answer=lambda name: bar.advance(),
            )
            others_used = others.processors()
    if others_used > NOTABLE:
        options.note(
            f"note: other processes used {others_used:.1f} of {os.cpu_count()} processors during "
            "the measurement, so speeds are uncertain"
        )
    for name, why in measurements.ended.items():
        unavailable.append({"method": name, "reason": why})
        options.note(f"note: no row for {name}: {why}")
    for traceback in measurements.failed.values():
        typer.echo(traceback, err=True)
    loops: list[str] = []
    if leave_out_loops:
        answered = max(map(len, measurements.samples), default=0)
        measurements, loops = measurements.without_loops()
        options.note(f"note: left out {len(loops)} of {answered} answers that repeat in loops")
    with Bar("checking answers", len(method_runs)) as bar:
        rows = summarise(
            measurements,
            Judge(engine.model),
            [c.name for c in method_runs if not c.lossless],
            lambda prompt, tokens: full_model_on(engine.decoder, prompt, tokens),
            None if tasks is None else scoring(tasks, engine.tokenizer),
            on_row=bar.advance,
        )
    read = bandwidth.read_bandwidth(device)
    weights = bandwidth.bytes_per_step(engine.model, engine.decoder)
    share = bandwidth.share_of(read, weights, rows, batch)
    usable = measurements.usable()
    console = options.console()
    if rows and show is not None:
        show(rows)
    elif rows:
        console.print(report.table(rows, title))
        if tasks is not None:
            console.print(report.score_table(rows))
        console.print(report.bandwidth_line(read, share))
    else:
        reason = (
            "all answers repeat in loops"
            if loops and not measurements.prompts
            else "the run ended before every method had answered one prompt"
        )
        console.print(f"Nothing was measured: {reason}.")
    content = report.document(
        provenance.collect(
            device,
            backend=engine.backend,
            read_bandwidth_bytes_per_second=read,
            plain_share_of_bandwidth=share,
            other_processes_used=round(others_used, 2),
        ),
        rows,
        **settings,
        prompts=len(usable[0]) if usable else 0,
        max_new_tokens=max_new_tokens,
        batch=batch,
        repeats=len(usable),
        warmup=warmup,
        skipped=prompts.skipped,
        truncated=prompts.truncated,
        loops=loops if leave_out_loops else None,
        interrupted=measurements.interrupted,
        unavailable=unavailable,
        tuned=engine.tuned_settings,
        trained_on_questions=seen,
        predicted=predictions(engine, rows) if batch == 1 else {},
        accelerators={
            name: about
            for name, accelerator in engine.accelerators.items()
            if (about := trained(accelerator)) is not None
        },
    )
    return content, rows, measurements
