"""`multirate train`: trains an accelerator for a model on text files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from multirate.cli import options
from multirate.cli.errors import INTERRUPTED
from multirate.errors import UserError
from multirate.training.settings import TrainSettings


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="The base model: a folder, GGUF file, hub id or name. It stays unchanged."
        ),
    ],
    more_data: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="More data files.")
    ] = None,
    *,
    data: Annotated[list[Path], typer.Option(help="JSON or JSONL file to train on (repeatable).")],
    out: Annotated[Path, typer.Option(help="Folder for the accelerator.")],
    method: Annotated[
        str | None,
        typer.Option(
            help="Which method to train (default: m2r2-carry; multirate info lists them)."
        ),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(help="tokens: draft text. experts: predict which experts a mixture needs."),
    ] = "tokens",
    option: Annotated[
        list[str] | None,
        typer.Option(help="A setting of the method, NAME=VALUE, such as gates=[2] (repeatable)."),
    ] = None,
    threads: options.Threads = None,
    settings: TrainSettings,
) -> None:
    """Train an accelerator for a model. The model itself is not changed.

    After an interruption, run the same command again to resume.
    """
    if objective not in ("tokens", "experts"):
        raise UserError(f"--objective is {objective!r}; accepted: tokens or experts")
    options.set_threads(threads)

    from multirate.methods.spec import parse_settings, recommended
    from multirate.training.loop import train

    method_options = parse_settings(option or [], "--option")
    options.keep_transformers_quiet()
    if objective == "experts":
        method = recommended("experts")
    result = train(model, [*data, *(more_data or [])], out, method, settings, method_options)
    if not result.finished:
        options.note(f"interrupted after step {result.steps}: run the same command to resume")
        raise typer.Exit(INTERRUPTED)
    typer.echo(f"{result.directory}")
