"""`multirate tune`: finds a method's fastest settings for a model on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multirate import tuned as kept
from multirate.cli import options
from multirate.errors import UserError
from multirate.io import check_folder, check_writable

if TYPE_CHECKING:
    from multirate.lab.bench.tune import Tried


def command(
    model: options.Model = None,
    accelerator: options.Accelerator = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="Method to tune, trained or not (default: the accelerator's, else m2r2-carry)."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="JSON or JSONL file of prompts, not a benchmark's (default: built-in prompts)."
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Minutes to measure.")] = 5.0,
    max_new_tokens: options.MaxNewTokens = 96,
    *,
    machine: options.Machine,
) -> None:
    """Compare a method's settings and save the fastest for this machine.

    generate and bench then use them, unless you pass --no-tuned. Settings never change the text. An
    interrupted run saves nothing.
    """
    if not 0 < minutes < 1e4:
        raise UserError(f"--minutes is {minutes:g}: it must be above 0 and below 10000")

    from multirate.lab.bench.tune import candidates, runner, tune, tuning_prompts
    from multirate.methods.spec import PLAIN, all_specs, find
    from multirate.training.fingerprint import fingerprint

    if method is not None:
        candidates(find(method))  # fails before anything is loaded
    loaded, engine = machine.attach(model)
    options.add_accelerator(engine, model, accelerator, method)
    name = method or engine.default
    if name == PLAIN:
        raise UserError("there is nothing to tune: give --accelerator FOLDER or --method NAME")
    choices = candidates(engine.spec_of(name))
    prompts = tuning_prompts(loaded.tokenizer, data)
    beside = engine.accelerators.get(name)
    base = fingerprint(loaded.model)
    path = kept.place(None if beside is None else beside.folder, name, base)
    _check_file(path)
    options.note(f"comparing {len(choices)} settings of {name} for {minutes:g} minutes")
    best, (plain, *others), tried = tune(
        runner(engine, max_new_tokens),
        name,
        choices,
        prompts,
        60 * minutes,
        on_round=lambda number, left, speed: options.note(
            f"round {number}: {left} settings left, the fastest at {speed:.1f} tokens/s"
        ),
        drop=engine.drop,
        beside=[other for other, one in all_specs().items() if one.yardstick and other != name],
    )
    options.console().print(_table(plain, others, tried))
    kept.store(
        path,
        kept.Tuned(
            name,
            best.settings,
            base,
            "" if beside is None else beside.weights_sha256,
            engine.machine,
            datetime.now(timezone.utc).isoformat(timespec="seconds"),
            f"{len(prompts)} of {'the package' if data is None else data.name}",
            minutes,
            [one.figures(plain) for one in tried],
        ),
    )
    for faster in (one.name for one in others if one.speed > best.speed):
        options.note(f"note: {faster} is faster here and needs no training: --method {faster}")
    typer.echo(str(path))


def _check_file(path: Path) -> None:
    """UserError for a file that cannot be written, before minutes of work."""
    kept.read(path)
    check_folder(path.parent)
    if path.parent.is_dir():
        check_writable(path)


def _table(plain: Tried, others: Sequence[Tried], tried: Sequence[Tried]) -> Any:
    from rich.table import Table

    compared = "".join(f"; {one.name}: {one.speed:.1f}" for one in others)
    caption = f"Plain decoding: {plain.speed:.1f} tokens/s{compared}. The first row is saved."
    table = Table(caption=caption)
    for head in ("settings", "tokens/s", "speedup", "tokens per pass", "prompts"):
        table.add_column(head, justify="left" if head == "settings" else "right")
    for one in tried:
        figures = one.figures(plain)
        changed = one.name.partition(":")[2].replace(":", " ")
        table.add_row(
            changed or "(defaults)",
            f"{one.speed:.1f}",
            f"{figures['speedup']:.2f}x",
            f"{figures['tokens_per_step']:.2f}",
            str(one.prompts),
        )
    return table
