"""Commands whose parameters are dataclasses of options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from multirate.cli import help
from multirate.io import check_text
from multirate.methods._shared.field_help import field_help


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it: a parameter that is a dataclass becomes one option for each
    field, whose annotation is the option. Text arguments are checked to be UTF-8; file names may be
    any bytes.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        for name, value in arguments.items():
            for text in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(text, str):
                    check_text(text, "MODEL" if name == "model" else f"--{name.replace('_', '-')}")
        for name, group in groups.items():
            values = {field.name: arguments.pop(field.name) for field in fields(group)}
            for field in fields(group):
                if isinstance(field.default, tuple):
                    values[field.name] = tuple(values[field.name] or ())
            arguments[name] = group(**values)
        command(**arguments)

    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += _options(groups[name])
        else:
            parameters.append(_option(name, hints[name], parameter.default))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _options(group: Any) -> list[inspect.Parameter]:
    """Of each field. One whose annotation is no option has its help below it in the source."""
    hints = get_type_hints(group, include_extras=True)
    found = []
    for field in fields(group):
        hint, default = hints[field.name], field.default
        if get_origin(hint) is not Annotated:
            if isinstance(default, tuple):
                hint, default = list[get_args(hint)[0]] | None, None  # type: ignore[misc]
            option = typer.Option(
                help=field_help(group)[field.name],
                show_default=default is not None,
                rich_help_panel=help.PANELS.get(field.name),
            )
            hint = Annotated[hint, option]
        given = inspect.Parameter.empty if default is MISSING else default
        found.append(_option(field.name, hint, given))
    return found


def _option(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
