"""What a user can mend becomes one sentence on stderr and an exit code; everything else keeps its
traceback.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from multirate.errors import Diverged, Notice, UserError
from multirate.io import check_text

FAILED = 1
MENDABLE = 2
INTERRUPTED = 130


def checked(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which refuses arguments that are not UTF-8. The names of files may be any
    bytes: they are paths, not texts.
    """

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        for name, value in arguments.items():
            for text in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(text, str):
                    check_text(text, "MODEL" if name == "model" else f"--{name.replace('_', '-')}")
        command(**arguments)

    return run


class Group(TyperGroup):
    """Commands whose mendable errors end with code 2, and Ctrl-C with 130, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show(warnings.showwarning)
                return super().invoke(ctx)
        except UserError as error:
            fail(str(error))
        except Diverged as error:
            fail(str(error), FAILED)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except (
            BrokenPipeError
        ):  # the reader of our output went away (`| head`): nothing left to say
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except OSError as error:
            if error.errno is None:
                raise
            name = f" {error.filename}" if error.filename else ""
            fail(f"cannot use{name}: {(error.strerror or str(error)).lower()}")
        except Exception as error:
            # Libraries wrap a full disk into errors of their own, which carry only its text.
            if "No space left on device" not in str(error):
                raise
            fail("cannot write the output: no space left on the device")


def _show(otherwise: Callable[..., None]) -> Callable[..., None]:
    """Our own notices take one line, without the place in the source that they come from."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, Notice):
            typer.echo(f"note: {message}", err=True)
        else:
            otherwise(message, category, *place, **more)

    return show


def fail(sentence: str, code: int = MENDABLE) -> None:
    """Prints `error: sentence` to stderr, on one line, and ends the command with the code."""
    try:
        sys.stdout.flush()
    # what could not be written would be tried again at the end, and the exit code be the
    # interpreter's
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    typer.echo(f"error: {' '.join(sentence.split())}", err=True)
    raise typer.Exit(code) from None
