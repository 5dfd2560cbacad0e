"""`multirate bench --methods experts`: compares the ways of loading experts, on the same tokens,
with one or more memory budgets.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multirate.cli import options
from multirate.cli.bench_run import Measuring, prepared
from multirate.cli.errors import INTERRUPTED, WRONG_ANSWERS
from multirate.cli.progress import Bar
from multirate.errors import UserError
from multirate.io import check_writable, write_atomically, write_json

if TYPE_CHECKING:
    from multirate.engine import Engine
    from multirate.experts.store import ExpertStore
    from multirate.lab.bench.expert_policies import ExpertRun
    from multirate.lab.bench.suites import Question

EXPERTS = "experts"


@dataclass(frozen=True)
class ExpertOptions:
    """Of experts loaded from disk; budgets and disk speed are still text."""

    experts: options.Experts = None
    expert_memory: Annotated[
        str | None,
        options.of_experts(
            help="With --methods experts: memory budgets, such as 8MB,25% (default: 25%)."
        ),
    ] = None
    disk_speed: Annotated[
        str | None,
        options.of_experts(
            help="With --methods experts: limit reads to this speed, such as 500MB/s."
        ),
    ] = None
    expert_predictor: options.ExpertPredictor = None
    page: Annotated[
        Path | None,
        options.of_experts("--html", help="With --methods experts: write a page with timelines."),
    ] = None

    def check_unused(self) -> None:
        """UserError for what only `--methods experts` uses."""
        for name, given in (
            ("--expert-memory", self.expert_memory),
            ("--disk-speed", self.disk_speed),
            ("--expert-predictor", self.expert_predictor),
            ("--html", self.page),
        ):
            if given is not None:
                raise UserError(f"{name} {given} needs --methods {EXPERTS}")

    @property
    def bytes_per_second(self) -> int | None:
        from multirate.experts.named_policies import parse_bytes

        speed = self.disk_speed
        return parse_bytes(speed.removesuffix("/s"), "--disk-speed") if speed else None


def command(
    model: str | None,
    questions: list[Question],
    about: dict[str, Any],
    names: list[str],
    given: ExpertOptions,
    how: Measuring,
    json: Path | None,
) -> None:
    """Measures, prints a table per budget, and writes JSON and page. Ends the command if tokens
    differ, and if it was interrupted.

    about: of the questions, for the JSON. names: policies, or only "experts" for all policies.
    """
    from multirate.engine import attach
    from multirate.experts.runtime import ExpertSettings
    from multirate.lab.bench import expert_report
    from multirate.lab.bench.expert_policies import ALL_POLICIES, measure_policies
    from multirate.lab.pages.page import PAGE, check_installed, is_page

    if model is None or given.experts is None:
        raise UserError(
            "--methods experts needs MODEL and --experts FOLDER, the model's store made with "
            "multirate pack"
        )
    policies = [name for name in names if name != EXPERTS]
    unknown = [name for name in policies if name not in ALL_POLICIES]
    if unknown:
        raise UserError(
            f"expert policy {unknown[0]!r} is unknown; accepted: {', '.join(ALL_POLICIES)}"
        )
    speed = given.bytes_per_second
    if given.page is not None:
        check_installed()
        check_writable(given.page, PAGE, is_page)
    engine = attach(model, experts=given.experts, expert_predictor=given.expert_predictor)
    assert engine.experts is not None and engine.experts.runtime is not None
    if not policies:
        policies = [
            one for one in ALL_POLICIES if one != "accelerated" or engine.experts.has_accelerated
        ]
    budgets = _budgets(engine.experts.store, given.expert_memory)
    prompts = prepared(engine, questions, how.max_new_tokens, how.truncate)
    total = len(budgets) * how.repeats * len(prompts.prompts) * len(policies)
    with Bar("measuring", total) as bar:
        run = measure_policies(
            engine,
            prompts.prompts,
            policies,
            budgets,
            lambda budget: ExpertSettings(budget, disk_bytes_per_second=speed),
            max_new_tokens=how.max_new_tokens,
            repeats=how.repeats,
            on_answer=bar.advance,
        )
    about = {"model": Path(model).name, **about, "skipped": prompts.skipped}
    content = about | _content(engine, run, how, len(prompts.prompts), speed)
    everything = engine.experts.store.index.data_bytes
    for budget, rows in run.budgets:
        share = f"{100 * budget / everything:.0f}% of all"
        title = f"{expert_report.size(budget)} of memory for experts ({share}), batch 1, greedy"
        options.console().print(expert_report.table(rows, title))
    if json is not None:
        write_json(json, content)
    if given.page is not None:
        write_atomically(given.page, expert_report.page(run, content))
        typer.echo(f"page: {given.page}")
    engine.experts.remove()
    if not all(row.identical for row in run.rows):
        raise typer.Exit(WRONG_ANSWERS)
    if run.interrupted:
        options.note("interrupted: the tables above are of finished budgets")
        raise typer.Exit(INTERRUPTED)


def _content(
    engine: Engine, run: ExpertRun, how: Measuring, prompts: int, speed: int | None
) -> dict[str, Any]:
    from multirate import provenance

    assert engine.experts is not None and engine.experts.runtime is not None
    index = engine.experts.store.index
    return {
        **provenance.collect("cpu", backend=engine.backend),
        "dtype": index.record.weights,
        "prompts": prompts,
        "max_new_tokens": how.max_new_tokens,
        "repeats": how.repeats,
        "reads": engine.experts.runtime.note or "O_DIRECT",
        "disk_bytes_per_second": speed,
        "experts_bytes": index.data_bytes,
        "record_bytes": index.record.bytes,
        "layers": len(index.layers),
        "num_experts": index.num_experts,
        "top_k": index.top_k,
        "interrupted": run.interrupted,
        "rows": [asdict(row) for row in run.rows],
    }


def _budgets(store: ExpertStore, memory: str | None) -> list[int]:
    """The sizes of --expert-memory; by default a quarter of all experts. UserError for a size that
    is too small.
    """
    from multirate.experts.runtime import slots_for

    index = store.index
    texts = [part.strip() for part in memory.split(",")] if memory else []
    sizes = [size for text in texts if (size := _budget(text, index.data_bytes)) is not None]
    sizes = sizes or [max(index.data_bytes // 4, (index.top_k + 1) * index.record.bytes)]
    for size in sizes:
        slots_for(store, size)
    return sizes


def _budget(text: str, everything: int) -> int | None:
    """A size, or a share of all experts, such as 50%."""
    from multirate.experts.named_policies import parse_bytes

    if text.endswith("%") and text[:-1].replace(".", "", 1).isdigit():
        return math.ceil(everything * float(text[:-1]) / 100)
    return parse_bytes(text)
