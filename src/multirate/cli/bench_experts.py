"""`multirate bench --methods experts`: compares the ways of loading experts, on the same tokens,
with one or more memory budgets.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from multirate.cli import options
from multirate.cli.bench_run import Measuring, prepared
from multirate.cli.errors import INTERRUPTED, WRONG_ANSWERS
from multirate.cli.progress import Bar
from multirate.errors import UserError
from multirate.io import check_writable, write_atomically, write_json

if TYPE_CHECKING:
    from multirate.experts.store import ExpertStore
    from multirate.lab.bench.suites import Question

EXPERTS = "experts"


@dataclass(frozen=True)
class ExpertOptions:
    """The command line's options for experts; budgets and disk speed are still text."""

    store: Path | None
    memory: str | None
    disk_speed: str | None
    page: Path | None
    predictor: Path | None

    def check_unused(self) -> None:
        """UserError for what only `--methods experts` uses."""
        for name, given in (
            ("--expert-memory", self.memory),
            ("--disk-speed", self.disk_speed),
            ("--expert-predictor", self.predictor),
            ("--html", self.page),
        ):
            if given is not None:
                raise UserError(f"{name} {given} needs --methods {EXPERTS}")


def command(
    model: str | None,
    questions: list[Question],
    suite: str,
    data: Path,
    names: list[str],
    given: ExpertOptions,
    how: Measuring,
    json: Path | None,
) -> None:
    """Measures, prints a table per budget, and writes JSON and page. Ends the command if tokens
    differ, and if it was interrupted.

    names: policies, or only "experts" for all policies.
    """
    from multirate import provenance
    from multirate.engine import attach
    from multirate.experts.named_policies import parse_bytes
    from multirate.experts.runtime import ExpertSettings
    from multirate.lab.bench import expert_report
    from multirate.lab.bench.expert_policies import ALL_POLICIES, measure_policies
    from multirate.lab.pages.page import PAGE, check_installed, is_page

    if model is None or given.store is None:
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
    speed = None
    if given.disk_speed:
        speed = parse_bytes(given.disk_speed.removesuffix("/s"), "--disk-speed")
    if given.page is not None:
        check_installed()
        check_writable(given.page, PAGE, is_page)
    engine = attach(model, experts=given.store, expert_predictor=given.predictor)
    assert engine.experts is not None and engine.experts.runtime is not None
    if not policies:
        policies = [
            one for one in ALL_POLICIES if one != "accelerated" or engine.experts.has_accelerated
        ]
    budgets = _budgets(engine.experts.store, given.memory)
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
    index = engine.experts.store.index
    content = {
        **provenance.collect("cpu", backend=engine.backend),
        "model": Path(model).name,
        "suite": suite,
        "data": str(data),
        "dtype": index.record.weights,
        "prompts": len(prompts.prompts),
        "max_new_tokens": how.max_new_tokens,
        "repeats": how.repeats,
        "skipped": prompts.skipped,
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
    console = options.console()
    for budget, rows in run.budgets:
        share = f"{100 * budget / index.data_bytes:.0f}% of all"
        title = f"{expert_report.size(budget)} of memory for experts ({share}), batch 1, greedy"
        console.print(expert_report.table(rows, title))
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
