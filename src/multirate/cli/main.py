"""`multirate`: the commands, and `run`, the entry point."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

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
from multirate.cli.errors import Group, checked
from multirate.cli.version import version_text

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
for name, module in (
    ("generate", generate),
    ("answers", answers),
    ("texts", texts),
    ("train", train),
    ("calibrate", calibrate),
    ("tune", tune),
    ("export", export),
    ("pack", pack),
    ("bench", bench),
    ("eval", evaluate),
    ("demo", demo),
    ("info", info),
    ("inspect", inspect),
):
    app.command(name)(checked(module.command))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(version_text())
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
    """What the installed command calls. A terminal that cannot show a character shows its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()


if __name__ == "__main__":
    run()
