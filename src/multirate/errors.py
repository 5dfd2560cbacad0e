"""What users read: errors that they can fix, and notices."""

from __future__ import annotations

import warnings

MOST_SEED = (1 << 63) - 1
"""The largest seed that every generator and file format accepts (a signed 64-bit number)."""


class UserError(Exception):
    """A path, value, file or model cannot be used. The message is one sentence that names it and
    says what is accepted.
    """


class Diverged(Exception):
    """Training reached values that are not finite. The command line prints the message and exits
    with code 1, not with the usage error of a UserError.
    """


class Notice(UserWarning):
    """Something works differently, or slower, than you might expect. The command line prints it as
    a `note:` line.
    """


_said: set[str] = set()


def say_once(sentence: str) -> None:
    """Warns with a `Notice`, once per process for each sentence."""
    if sentence not in _said:
        _said.add(sentence)
        warnings.warn(sentence, Notice, stacklevel=3)


def first_line(error: BaseException) -> str:
    """The error's type and its first non-empty line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
