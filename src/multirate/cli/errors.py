"""Errors that a user can fix become one sentence on stderr and an exit code. All other errors keep
their traceback.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from multirate.cli.help import Command, write_commands
from multirate.errors import Diverged, Notice, UserError

FAILED = WRONG_ANSWERS = 1
MENDABLE = 2
INTERRUPTED = 130


class Group(TyperGroup):
    """The program. Errors that a user can fix end it with code 2 and Ctrl-C ends it with 130,
    without a traceback.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the examples, the commands in groups, then the program's own options."""
        formatter.write(f"\n{self.epilog}\n")
        write_commands(self, ctx, formatter)
        Command.format_options(self, ctx, formatter)  # type: ignore[arg-type]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.indentation():
            formatter.write_text("\nmultirate COMMAND --help shows a command's options.")

    def invoke(self, ctx: Any) -> Any:
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
        except BrokenPipeError:  # the reader of our output went away, as in `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except OSError as error:
            if error.errno is None:
                raise
            name = f" {error.filename}" if error.filename else ""
            fail(f"cannot use{name}: {(error.strerror or str(error)).lower()}")
        except Exception as error:
            # Libraries raise their own errors for a full disk, with only its text.
            if "No space left on device" not in str(error):
                raise
            fail("cannot write the output: no space left on the device")


def _show(otherwise: Callable[..., None]) -> Callable[..., None]:
    """Prints our own notices on one line, without their place in the source."""

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
    # else the interpreter would try to write it again at exit, and set its own exit code
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    typer.echo(f"error: {' '.join(sentence.split())}", err=True)
    raise typer.Exit(code) from None
