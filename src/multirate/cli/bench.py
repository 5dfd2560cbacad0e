"""`multirate bench`: compares methods on the prompts of a suite."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multirate.cli import bench_experts, options
from multirate.cli.bench_run import Measuring, run
from multirate.cli.errors import FAILED, INTERRUPTED, WRONG_ANSWERS
from multirate.errors import UserError

if TYPE_CHECKING:
    from multirate.engine import Engine
    from multirate.lab.bench.suites import Question
    from multirate.lab.evaluation.task_suite import TaskSuite

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
    _check_numbers(repeats, warmup, max_new_tokens, batch)

    from multirate.decoding.logits import SamplingSettings
    from multirate.engine import attach
    from multirate.io import write_json
    from multirate.lab.bench import frontier
    from multirate.lab.bench.baselines import parse_baselines
    from multirate.lab.bench.report_page import check as check_report
    from multirate.lab.bench.report_page import write as write_report

    sampling = SamplingSettings(temperature, seed=None if temperature == 0 else seed)
    if baselines and not sampling.greedy:
        raise UserError("--baselines works only with greedy decoding: leave out --temperature")
    if baselines and batch > 1:
        raise UserError(f"--baselines answers one prompt at a time: leave out --batch {batch}")
    if leave_out_loops and batch > 1:
        raise UserError(f"--leave-out-loops needs one prompt at a time: leave out --batch {batch}")
    questions, tasks = _questions(suite, data, limit, task)
    beside = parse_baselines(baselines or "")
    options.check_json(json)
    if report is not None:
        check_report(report)
    options.set_threads(threads)
    chosen = method_names(methods) if methods else []
    if points is not None and DYNAMIC not in chosen:
        raise UserError(f"--points {points} needs --methods {DYNAMIC}")
    measuring = Measuring(max_new_tokens, repeats, warmup, batch, truncate, leave_out_loops)
    of_experts = bench_experts.ExpertOptions(
        experts, expert_memory, disk_speed, page, expert_predictor
    )
    if experts is not None or bench_experts.EXPERTS in chosen:
        unused = {
            f"--batch {batch}": batch > 1,
            "--leave-out-loops": leave_out_loops,
            "--report (use --html FILE)": report is not None,
            "--baselines": bool(baselines),
            "--temperature": not sampling.greedy,
        }
        for name, given in unused.items():
            if given:
                raise UserError(f"{name} does not work with experts loaded from disk: leave it out")
        names = chosen or [bench_experts.EXPERTS]
        bench_experts.command(model, questions, suite, data, names, of_experts, measuring, json)
        return
    of_experts.check_unused()
    loaded = options.load(model, dtype, device, weights=weights)
    engine = attach(loaded.model, backend=backend, tokenizer=loaded.tokenizer)
    engine.uses_tuned = tuned
    names, optional = _names(engine, model, chosen, accelerator or [], points)
    content, rows, measured = run(
        engine,
        questions,
        names,
        measuring,
        beside,
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
    if any(not row.lossless for row in rows if row.method in names) or DYNAMIC in chosen:
        bests = frontier.frontier(rows)
        metrics = [] if tasks is None else [tasks.metric]
        options.console().print(frontier.table(bests, *metrics))
        content["frontier"] = [asdict(best) for best in bests]
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


def _check_numbers(repeats: int, warmup: int, max_new_tokens: int, batch: int) -> None:
    for name, value, least in (
        ("--repeats", repeats, 1),
        ("--warmup", warmup, 0),
        ("--max-new-tokens", max_new_tokens, 1),
        ("--batch", batch, 1),
    ):
        if value < least:
            raise UserError(f"{name} is {value}: at least {least} is needed")


def _questions(
    suite: str, data: Path, limit: int | None, category: str | None
) -> tuple[list[Question], TaskSuite | None]:
    """The questions of a suite, or of one of this package's tasks. UserError for an unknown suite,
    and if a task is given a category.
    """
    from multirate.lab.bench.suites import READERS, load_suite
    from multirate.lab.evaluation.task_files import local_tasks
    from multirate.lab.evaluation.task_suite import is_task, load_task_suite

    if is_task(suite):
        if category is not None:
            raise UserError(f"--task {category!r}: suite {suite} has no categories")
        tasks = load_task_suite(suite, data, limit)
        return tasks.questions, tasks
    if suite not in READERS:
        known = ", ".join([*READERS, *local_tasks()])
        raise UserError(f"unknown suite {suite!r}; accepted: {known}")
    return load_suite(suite, data, limit, category), None


def method_names(text: str) -> list[str]:
    """Splits a comma-separated list and drops repetitions. Commas in [] belong to a setting."""
    parts = re.split(r",(?![^\[\]]*\])", text)
    names = list(dict.fromkeys(name.strip() for name in parts if name.strip()))
    if not names:
        raise UserError("--methods names no method: multirate info lists them")
    return names


def _names(
    engine: Engine,
    model: str | None,
    chosen: list[str],
    accelerators: list[str],
    points: int | None,
) -> tuple[list[str], list[str]]:
    """(the methods to measure, those of them that may be left out where they cannot run). Adds the
    accelerators that they need to the engine. chosen: --methods; empty: the default.
    """
    from multirate.lab.bench import frontier
    from multirate.lab.bench.method_runs import GENERATE, GENERATE_STATIC
    from multirate.lab.bench.rows import REFERENCES
    from multirate.loading.hub import reference_accelerators
    from multirate.methods.spec import PLAIN, dynamic_methods, joined_variant, untrained_drafters

    own = reference_accelerators(model)
    optional = untrained_drafters() if ALL in chosen else []
    names = chosen or list(own)
    if ALL in chosen:
        names = _unique(*REFERENCES, *optional, *own, *chosen)
        names.remove(ALL)
    asked = [name for name in names if name != DYNAMIC]
    dynamic = [name for name in dynamic_methods(trained=True) if DYNAMIC in names and name in own]
    options.add_accelerators(engine, accelerators, [*asked, *dynamic], own)
    names = asked if chosen else [*REFERENCES, *engine.accelerators]
    if DYNAMIC in chosen:
        names = _unique(*asked, *frontier.settings_of(engine, points or frontier.POINTS))
    elif optional:
        drafting = [*optional, *engine.accelerators]
        joined = (joined_variant(name, engine.spec_of(name)) for name in drafting)
        names = _unique(*names, *engine.accelerators, *filter(None, joined))
    transformers_own = (GENERATE, GENERATE_STATIC)
    for name in names:  # fails on an unknown name before anything is packed or compiled
        if name not in transformers_own:
            engine.spec_of(name, besides=(ALL, DYNAMIC, *transformers_own))
    if PLAIN not in names:
        options.note(f"note: added {PLAIN}, the baseline for the answers")
        names = [PLAIN, *names]
    return names, optional


def _unique(*names: str) -> list[str]:
    return list(dict.fromkeys(names))
