"""Errors that a user can mend. The command line prints their one sentence and exits with code 2."""

from __future__ import annotations


class UserError(Exception):
    """A path, value, file or model that cannot be used, in one sentence that names it and what is accepted."""


class Notice(UserWarning):
    """What a user should know of a call that works nevertheless, such as a slower path. One line."""
