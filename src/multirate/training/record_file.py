"""Files of one JSON record a line that an interrupted command goes on with.

What stands at the path is looked at first, and nothing is changed until all of it is known to be
this command's. What is ever cut off is the rest of a last line that a kill left.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multirate.errors import UserError
from multirate.io import locked, written_elsewhere

Write = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Records:
    """lines: the whole ones. whole, size: bytes of these and of all of the file."""

    path: Path
    lines: list[bytes]
    whole: int
    size: int

    @contextmanager
    def append(self) -> Iterator[Write]:
        """Gives a function that writes one more record at once, after what a kill left is cut off.
        Raises UserError for what cannot be written, or is written by another process.
        """
        try:
            file = self.path.open("ab", buffering=0)  # a failed write is not tried again on closing
        except OSError as error:
            raise _unwritable(self.path, error) from None
        with file:

            def write(record: dict[str, Any]) -> None:
                line = memoryview(line_of(record))
                try:
                    while line:
                        line = line[file.write(line) :]
                except OSError as error:
                    raise _unwritable(self.path, error) from None

            if not locked(file.fileno()):
                raise written_elsewhere(self.path)
            if file.seek(0, 2) != self.size:
                raise UserError(
                    f"{self.path} changed during the run; check whether another process writes it"
                )
            if self.whole < self.size:
                file.truncate(self.whole)
            yield write


def line_of(record: dict[str, Any]) -> bytes:
    """As it stands in the file."""
    return json.dumps(record).encode() + b"\n"


def beginning_of(record: dict[str, Any]) -> bytes:
    """What lines of records that begin with these fields begin with."""
    return line_of(record)[: -len(b"}\n")]


def look_at(path: Path, first: bytes, other: bytes, what: str) -> Records:
    """The records in a file that begins with `first` and whose further lines begin with `other`;
    none where there is no file, or an empty one. Changes nothing. what: a record is, in words.
    Raises UserError for any other file.
    """
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):
            raise UserError(f"cannot write {path}: it is not a regular file")
        with path.open("rb") as file:
            if not _begins(file.read(len(first)), first):
                raise foreign(path, 1, what)
            file.seek(0)
            *lines, rest = file.read().split(b"\n")
    except FileNotFoundError:
        return Records(path, [], 0, 0)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot read {path}: {reason}") from None
    if rest and not _begins(rest, other if lines else first):
        raise foreign(path, len(lines) + 1, what)
    whole = sum(len(line) + 1 for line in lines)
    return Records(path, lines, whole, whole + len(rest))


def foreign(path: Path, number: int, what: str) -> UserError:
    """The error for a line that this command did not write."""
    return UserError(f"{path}, line {number}: not {what}; choose another --out or delete the file")


def _begins(line: bytes, beginning: bytes) -> bool:
    """Whether it begins so, or ends before that is known."""
    return line[: len(beginning)] == beginning[: len(line)]


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot write {path}: {(error.strerror or str(error)).lower()}")
