"""`multirate`: the commands, and `run`, the entry point."""

from __future__ import annotations

from typing import Annotated

import typer

from multirate import __version__
from multirate.cli import (
    answers,
    bench,
    calibrate,
    demo,
    evaluate,
    export,
    generate,
    info,
    inspect,
    pack,
    texts,
    train,
    tune,
)
from multirate.cli.errors import Group

app = typer.Typer(
    name="multirate",
    cls=Group,
    help="The same text from a Hugging Face language model, sooner: M2R2 self-speculative "
    "decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("generate")(generate.command)
app.command("answers")(answers.command)
app.command("texts")(texts.command)
app.command("train")(train.command)
app.command("calibrate")(calibrate.command)
app.command("tune")(tune.command)
app.command("export")(export.command)
app.command("pack")(pack.command)
app.command("bench")(bench.command)
app.command("eval")(evaluate.command)
app.command("demo")(demo.command)
app.command("info")(info.command)
app.command("inspect")(inspect.command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"multirate {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def run() -> None:
    """What the installed command calls."""
    app()


if __name__ == "__main__":
    run()
