"""`multirate tune`: a method's fastest settings for a model on this machine."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from multirate.cli import options
from multirate.errors import UserError


def command(
    model: options.Model = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            "--accelerator", "-a", help="An accelerator's folder or hub id.", show_default=False
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="The method to tune (default: the accelerator's, else the recommended one); also "
            "one without training, such as prompt_lookup.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="JSON or JSONL of prompts to tune on, never a benchmark's (default: the package's "
            "own).",
            show_default=False,
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time to measure, the same for any method.")] = 5.0,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Longest answer.")
    ] = 96,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    backend: options.Backend = "auto",
    threads: options.Threads = None,
) -> None:
    """Measure a method's settings side by side and keep the fastest for this machine.

    generate and bench then use them (--no-tuned ignores them). Every answer is the model's own,
    whatever the settings; interrupted, nothing is written.
    """
    if not 0 < minutes < 1e4:
        raise UserError(f"--minutes is {minutes:g}: accepted are numbers above 0")
    options.set_threads(threads)

    from rich.table import Table

    from multirate.bench.tune import candidates, runner, tune, tuning_prompts
    from multirate.calibration import tuned as kept
    from multirate.engine import attach
    from multirate.hub import reference_accelerators
    from multirate.io import check_folder, check_writable
    from multirate.methods.spec import PLAIN, all_specs, find, recommended
    from multirate.model.native.decoder import narrow_weights
    from multirate.training.fingerprint import fingerprint

    if method is not None:
        candidates(find(method))  # one that cannot be tuned is said before anything loads
    loaded = options.load(model, dtype, device)
    engine = attach(loaded, backend=backend)
    wanted = [method or recommended()] if method or not accelerator else []
    options.add_accelerators(
        engine, [accelerator] if accelerator else [], wanted, reference_accelerators(model)
    )
    name = method or engine.default
    if name == PLAIN:
        raise UserError("there is nothing to tune: give --accelerator, or --method NAME")
    known = engine.spec_of(name)
    choices = candidates(known, stages=narrow_weights(engine.decoder))
    prompts = tuning_prompts(loaded.tokenizer, data)
    beside = engine.accelerators.get(name)
    base = fingerprint(loaded.model)
    path = kept.place(None if beside is None else beside.folder, name, base)
    # what cannot be added to is said before minutes of work
    kept.read(path)
    check_folder(path.parent)
    if path.parent.is_dir():
        check_writable(path)
    options.note(f"{len(choices)} settings of {name}, {minutes:g} minutes")
    best, (plain, *others), tried = tune(
        runner(engine, max_new_tokens),
        name,
        choices,
        prompts,
        60 * minutes,
        on_round=lambda number, left, speed: options.note(
            f"round {number}: {left} left, the fastest {speed:.1f} tokens/s"
        ),
        drop=engine.drop,
        beside=[other for other, one in all_specs().items() if one.yardstick and other != name],
    )
    compared = "".join(f"; {one.name}: {one.speed:.1f}" for one in others)
    caption = f"Plain decoding: {plain.speed:.1f} tokens/s{compared}. The first row is kept."
    table = Table(caption=caption)
    for head in ("settings", "tokens/s", "speedup", "tokens/step", "prompts"):
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
    options.console().print(table)
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
    for one in others:
        if one.speed > best.speed:
            options.note(
                f"note: {one.name}, which needs no training, is faster here: --method {one.name}"
            )
    typer.echo(str(path))
