"""What a user is told: errors that he can mend, and notices."""

from __future__ import annotations

import warnings


class UserError(Exception):
    """A path, value, file or model that cannot be used, in one sentence that names it and what is
    accepted.
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
