"""`multirate methods`: lists the methods, and the settings of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from multirate.cli import options

if TYPE_CHECKING:
    from multirate.methods._shared.field_help import Setting


def command(
    name: Annotated[str | None, typer.Argument(help="A method, to show its settings.")] = None,
) -> None:
    """List the methods, or show the settings of one.

    Decoding settings follow the method's name, as in --method sam:tokens=7. Training settings
    follow --option.
    """
    from rich.table import Table

    from multirate.methods._shared.described import decoding_settings, training_settings
    from multirate.methods.spec import all_specs, find

    if name is not None:
        method = find(name)
        typer.echo(f"{name}: {method.summary}.")
        _print("Decoding", decoding_settings(method))
        _print("Training", training_settings(method))
        return
    table = Table(box=None, pad_edge=False)
    for head in ("method", "training", "text", "what it does"):
        table.add_column(head, no_wrap=head == "method")
    for method in all_specs().values():
        trained = "yes" if method.training else "no"
        text = "lossless" if method.lossless else "lossy"
        table.add_row(method.name, trained, text, method.summary)
    options.console().print(table)


def _print(title: str, settings: Sequence[Setting]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    if not settings:
        return
    console = options.console()
    console.print(f"\n{title} settings")
    for one in settings:
        head = Text.assemble("  ", (one.name, "bold"), f" = {one.default}  ({one.accepted})")
        console.print(head)
        console.print(Padding(Text(one.help), (0, 0, 0, 6)))
