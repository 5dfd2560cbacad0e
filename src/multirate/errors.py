"""What a user is told: errors that he can mend, and notices."""

from __future__ import annotations

import warnings

MOST_SEED = (1 << 63) - 1
"""The largest seed: a signed number of 64 bits, which every generator and file takes."""


class UserError(Exception):
    """A path, value, file or model that cannot be used, in one sentence that names it and what is
    accepted.
    """


class Diverged(Exception):
    """A training whose numbers are no longer finite, in one sentence. The command line prints it
    and ends with code 1: nothing about the call is wrong in form.
    """


class Notice(UserWarning):
    """Something works otherwise, or slower, than was to be expected. The command line prints it as
    a `note:` line.
    """


_said: set[str] = set()


def say_once(sentence: str) -> None:
    """Warns with a `Notice`, once per process and sentence."""
    if sentence not in _said:
        _said.add(sentence)
        warnings.warn(sentence, Notice, stacklevel=3)


def first_line(error: BaseException) -> str:
    """An error's kind and the first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
