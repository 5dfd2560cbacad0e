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
    chat,
    demo,
    evaluate,
    export,
    generate,
    info,
    inspect,
    methods,
    pack,
    quantize,
    serve,
    texts,
    train,
    tune,
)
from multirate.cli.errors import Group
from multirate.cli.help import Command
from multirate.cli.signature import flat
from multirate.cli.version import version_text

EXAMPLES = """\
Start here:
  multirate demo
  multirate chat
  multirate generate ./my-model.gguf -p "Why is the sky blue?" --stats
  multirate info ./my-model.gguf"""
app = typer.Typer(
    name="multirate",
    cls=Group,
    help="Generate the same text faster, with a Hugging Face model or a GGUF file.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
USE, TRAIN, MEASURE, RESEARCH = "Use", "Train", "Measure", "Research and experts"
for name, module, panel, summary in (
    ("generate", generate, USE, "Generate text from a prompt."),
    ("chat", chat, USE, "Talk with a model."),
    ("demo", demo, USE, "Watch a model answer with and without drafts."),
    ("serve", serve, USE, "Serve a model over HTTP, for OpenAI's clients."),
    ("methods", methods, USE, "List the methods, and their settings."),
    ("info", info, USE, "Show what a model is and how it runs here."),
    ("quantize", quantize, USE, "Write a model as a quantised GGUF file."),
    ("train", train, TRAIN, "Train an accelerator for a model."),
    ("answers", answers, TRAIN, "Have a model write its own training text."),
    ("tune", tune, TRAIN, "Find the fastest settings for this machine."),
    ("calibrate", calibrate, TRAIN, "Set dynamic mode's thresholds for a quality target."),
    ("texts", texts, TRAIN, "Prepare texts that drafts are copied from."),
    ("export", export, TRAIN, "Save an accelerator for other programs."),
    ("bench", bench, MEASURE, "Compare methods by speed; check their answers."),
    ("eval", evaluate, MEASURE, "Score a model on tasks with lm-eval."),
    ("inspect", inspect, RESEARCH, "Draw a model's residuals on an HTML page."),
    ("pack", pack, RESEARCH, "Pack a mixture's experts for loading from disk."),
):
    app.command(name, cls=Command, rich_help_panel=panel, short_help=summary)(flat(module.command))


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
    """Entry point of the command. Characters that the terminal cannot show are escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()


if __name__ == "__main__":
    run()
