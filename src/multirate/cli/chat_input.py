"""What the user of `multirate chat` says: lines, blocks of lines and commands, typed or piped."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import typer

from multirate.cli import options
from multirate.errors import UserError
from multirate.io import check_text, decoded

PROMPT, CONTINUED = "> ", ". "
BLOCK = '"""'
"""Begins a message of several lines, and ends it."""
Read = Callable[[str], str]
"""Returns the next line, without its end, after showing a prompt. EOFError: there is none."""


@dataclass(frozen=True)
class Said:
    text: str
    is_command: bool = False
    """Whether it is one line that begins with a slash."""


def next_said(read: Read) -> Said:
    """A line, a block between triple quotes, or lines of which all but the last end in a backslash.
    The end of the input ends them, too. EOFError if nothing comes before it.
    """
    line = read(PROMPT)
    if line.startswith("/") and "\n" not in line:
        return Said(line.rstrip(), is_command=True)
    lines, block = [line], line.lstrip().startswith(BLOCK)
    with suppress(EOFError):
        if block:
            lines = [line.lstrip().removeprefix(BLOCK)]
            while not lines[-1].rstrip().endswith(BLOCK):
                lines.append(read(CONTINUED))
            lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(read(CONTINUED))
    text = "\n".join(lines)
    return Said(text.strip("\n") if block else text.strip())


def piped() -> Iterator[Said]:
    """What the lines of stdin say. UserError for bytes that are not UTF-8."""
    if sys.stdin is None:
        raise UserError("stdin is closed: give one message per line on stdin")
    number = 0

    def read(_: str) -> str:
        nonlocal number
        number += 1
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
        return decoded(line, f"stdin, line {number}").removesuffix("\n")

    with suppress(EOFError):
        while True:
            yield next_said(read)


class CtrlC:
    """What Ctrl-C does in a terminal, as a context manager around the whole chat, so that one that
    comes just after an answer does not end the program.

    Attributes:

    raises: whether it raises KeyboardInterrupt.
    pressed: whether it came since this was set to False.
    """

    def __init__(self) -> None:
        self.raises = self.pressed = False

    def _heard(self, *_: Any) -> None:
        self.pressed = True
        if self.raises:
            raise KeyboardInterrupt

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Within it, Ctrl-C raises, unless `raises` is set to False."""
        self.pressed, self.raises = False, True
        try:
            yield
        finally:
            self.raises = False

    def __enter__(self) -> CtrlC:
        self._before = signal.signal(signal.SIGINT, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)


def typed(ctrl_c: CtrlC) -> Iterator[Said]:
    """What the user says at a terminal. Ctrl-C drops what is being typed; twice in a row, it raises
    KeyboardInterrupt.
    """
    with suppress(ImportError):  # line editing and history
        import readline

        # else each line of a pasted text would be a message
        readline.parse_and_bind("set enable-bracketed-paste on")
    before = False
    while True:
        try:
            with ctrl_c.raising():
                said = next_said(_input)
        except EOFError:
            typer.echo("")
            return
        except KeyboardInterrupt:
            typer.echo("")
            if before:
                raise
            before = True
            options.note("Ctrl-C again ends the chat, as /exit and Ctrl-D do.")
        except UserError as error:
            options.note(f"error: {error}")
        else:
            before = False
            yield said


def _input(prompt: str) -> str:
    try:
        return check_text(input(prompt), "the line")
    except UnicodeDecodeError:
        raise UserError("the line: not UTF-8 text") from None
