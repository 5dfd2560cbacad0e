"""`multirate bench`: compares methods on the prompts of a suite."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multirate.cli import bench_experts, options
from multirate.cli.bench_run import BenchMachine, Measuring, Run, run
from multirate.errors import UserError

if TYPE_CHECKING:
    from multirate.engine import Engine
    from multirate.lab.bench.suites import Question
    from multirate.lab.evaluation.task_suite import TaskSuite

DYNAMIC = "dynamic"
"""In --methods: dynamic modes at several settings (lab/bench/frontier.py)."""
ALL = "all"
"""In --methods: the references, every lossless method without training, and every accelerator."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    suite: Annotated[
        str,
        typer.Option(
            help="mt_bench, spec_bench, self_instruct, koala, wizardlm, gsm8k, humaneval or text; "
            "or a task, which is also scored: wikisql, e2e_nlg or dialogsum."
        ),
    ] = "mt_bench"
    data: Annotated[
        Path, typer.Option(help="The suite's .jsonl or .jsonl.gz file, or the task's data folder.")
    ]
    limit: Annotated[
        int | None,
        typer.Option(help="Number of questions, spread evenly over the file (default: all)."),
    ] = None
    task: Annotated[str | None, options.measured(help="Use only this category of the suite.")] = (
        None
    )

    def read(self) -> tuple[list[Question], TaskSuite | None]:
        """The questions of a suite, or of one of this package's tasks. UserError for an unknown
        suite, and if a task is given a category.
        """
        from multirate.lab.bench.suites import READERS, load_suite
        from multirate.lab.evaluation.task_files import local_tasks
        from multirate.lab.evaluation.task_suite import is_task, load_task_suite

        if is_task(self.suite):
            if self.task is not None:
                raise UserError(f"--task {self.task!r}: suite {self.suite} has no categories")
            tasks = load_task_suite(self.suite, self.data, self.limit)
            return tasks.questions, tasks
        if self.suite not in READERS:
            known = ", ".join([*READERS, *local_tasks()])
            raise UserError(f"unknown suite {self.suite!r}; accepted: {known}")
        return load_suite(self.suite, self.data, self.limit, self.task), None


@dataclass(frozen=True)
class Compared:
    """The methods, and how they choose tokens."""

    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated names, with settings after colons, as in m2r2-carry:lookup=0 "
            "(default: generate, autoregressive and every accelerator). 'all' adds every lossless "
            "method without training, and text lookup for every drafter. 'dynamic' measures "
            "quality against speed."
        ),
    ] = None
    accelerator: Annotated[
        list[str] | None,
        typer.Option(
            "--accelerator",
            "-a",
            help="A trained accelerator: folder, hub id or NAME=FOLDER (repeatable).",
        ),
    ] = None
    baselines: Annotated[
        str | None,
        options.measured(
            help="Also measure, comma-separated: llamacpp (or llamacpp=FILE.gguf), bf16 (plain "
            "decoding of a quantised model's weights expanded to bf16), assisted (transformers "
            "with prompt lookup and early exit) or assistant=MODEL (transformers with a draft "
            "model)."
        ),
    ] = None
    temperature: Annotated[
        float,
        options.measured(help="0 is greedy; above 0 samples, with the same seed for every method."),
    ] = 0.0
    seed: Annotated[int, options.measured(min=0, help="Random seed, with --temperature.")] = 0
    points: Annotated[
        int | None,
        options.measured(
            min=1, help="With --methods dynamic: thresholds measured per method (default: 6)."
        ),
    ] = None
    tuned: options.Tuned = True

    def __post_init__(self) -> None:
        if self.baselines and self.temperature:
            raise UserError("--baselines works only with greedy decoding: leave out --temperature")
        if self.points is not None and DYNAMIC not in self.chosen:
            raise UserError(f"--points {self.points} needs --methods {DYNAMIC}")

    @property
    def chosen(self) -> list[str]:
        """--methods; empty: the default."""
        return method_names(self.methods) if self.methods else []

    @property
    def tokens(self) -> str:
        """How tokens are chosen, in words."""
        greedy = self.temperature == 0
        return "greedy" if greedy else f"temperature {self.temperature:g}, seed {self.seed}"


def command(
    model: options.Model = None,
    *,
    asked: Asked,
    compared: Compared,
    how: Measuring,
    machine: BenchMachine,
    json: options.Json = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write results.json and a page, report.html, to this folder."),
    ] = None,
    experts: bench_experts.ExpertOptions,
) -> None:
    """Compare methods by speed, and check that their answers are the same.

    All methods answer the same prompts in turns. A method with a wrong answer gets no speedup, and
    the exit code is 1.
    """
    from multirate.io import write_json
    from multirate.lab.bench.report_page import check as check_report
    from multirate.lab.bench.report_page import write as write_report

    if compared.baselines and how.batch > 1:
        raise UserError(f"--baselines answers one prompt at a time: leave out --batch {how.batch}")
    questions, tasks = asked.read()
    options.check_json(json)
    if report is not None:
        check_report(report)
    if experts.experts is not None or bench_experts.EXPERTS in compared.chosen:
        unused = {
            f"--batch {how.batch}": how.batch > 1,
            "--leave-out-loops": how.leave_out_loops,
            "--report (use --html FILE)": report is not None,
            "--baselines": bool(compared.baselines),
            "--temperature": compared.temperature != 0,
        }
        for name, given in unused.items():
            if given:
                raise UserError(f"{name} does not work with experts loaded from disk: leave it out")
        options.set_threads(machine.threads)
        names = compared.chosen or [bench_experts.EXPERTS]
        about = {"suite": asked.suite, "data": str(asked.data)}
        bench_experts.command(model, questions, about, names, experts, how, json)
        return
    experts.check_unused()
    measured = _measure(model, questions, tasks, asked, compared, how, machine)
    if json is not None:
        write_json(json, measured.content)
    if report is not None:
        typer.echo(str(write_report(report, measured.content)))
    measured.end()


def _measure(
    model: str | None,
    questions: list[Question],
    tasks: TaskSuite | None,
    asked: Asked,
    compared: Compared,
    how: Measuring,
    machine: BenchMachine,
) -> Run:
    from multirate.decoding.logits import SamplingSettings
    from multirate.lab.bench import frontier
    from multirate.lab.bench.baselines import parse_baselines

    sampling = SamplingSettings(
        compared.temperature, seed=None if compared.temperature == 0 else compared.seed
    )
    baselines = parse_baselines(compared.baselines or "")
    loaded, engine = machine.attach(model)
    engine.uses_tuned = compared.tuned
    names, optional = _names(engine, model, compared)
    measured = run(
        engine,
        questions,
        names,
        how,
        baselines,
        title=f"{asked.suite}, {loaded.name}, {machine.dtype}, batch {how.batch}, "
        f"{compared.tokens}",
        settings={
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "weights": engine.weights,
            "model": loaded.name,
            "suite": asked.suite,
            "data": str(asked.data),
            "task": asked.task,
            "seed": sampling.seed,
            **({} if sampling.greedy else {"temperature": sampling.temperature}),
        },
        sampling=sampling,
        optional=optional,
        tasks=tasks,
    )
    lossy = any(not row.lossless for row in measured.rows if row.method in names)
    if lossy or DYNAMIC in compared.chosen:
        bests = frontier.frontier(measured.rows)
        metrics = [] if tasks is None else [tasks.metric]
        options.console().print(frontier.table(bests, *metrics))
        measured.content["frontier"] = [asdict(best) for best in bests]
    return measured


def method_names(text: str) -> list[str]:
    """Splits a comma-separated list and drops repetitions. Commas in [] belong to a setting."""
    parts = re.split(r",(?![^\[\]]*\])", text)
    names = list(dict.fromkeys(name.strip() for name in parts if name.strip()))
    if not names:
        raise UserError("--methods names no method: multirate info lists them")
    return names


def _names(engine: Engine, model: str | None, compared: Compared) -> tuple[list[str], list[str]]:
    """(the methods to measure, those of them that may be left out where they cannot run). Adds the
    accelerators that they need to the engine.
    """
    from multirate.lab.bench import frontier
    from multirate.lab.bench.method_runs import GENERATE, GENERATE_STATIC
    from multirate.lab.bench.rows import REFERENCES
    from multirate.loading.hub import reference_accelerators
    from multirate.methods.spec import PLAIN, dynamic_methods, joined_variant, untrained_drafters

    chosen, own = compared.chosen, reference_accelerators(model)
    optional = untrained_drafters() if ALL in chosen else []
    names = chosen or list(own)
    if ALL in chosen:
        names = _unique(*REFERENCES, *optional, *own, *chosen)
        names.remove(ALL)
    asked = [name for name in names if name != DYNAMIC]
    dynamic = [name for name in dynamic_methods(trained=True) if DYNAMIC in names and name in own]
    options.add_accelerators(engine, compared.accelerator or [], [*asked, *dynamic], own)
    names = asked if chosen else [*REFERENCES, *engine.accelerators]
    if DYNAMIC in chosen:
        names = _unique(*asked, *frontier.settings_of(engine, compared.points or frontier.POINTS))
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
