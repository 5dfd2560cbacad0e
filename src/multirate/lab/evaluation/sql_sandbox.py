"""Runs a query that a model wrote, on a small table in memory, so that it can do no harm."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import Any

TABLE = "data"
"""What queries call the table."""
MAX_STEPS = 1_000_000
"""Instructions of SQLite's virtual machine that a query may take: a limit of time (well below a
second) that is the same on every machine, so that scores do not depend on how busy it is."""
MAX_LENGTH = 2_000
"""Characters of a query."""
_STEPS_BETWEEN_CHECKS = 1_000
_ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ)
_OF_NUMBERS = ("abs", "avg", "count", "max", "min", "round", "sum", "total")
_OF_NULLS = ("coalesce", "ifnull", "iif", "nullif")
_OF_TEXT = ("instr", "length", "like", "lower", "ltrim", "rtrim", "substr", "trim", "upper")
_FUNCTIONS = frozenset((*_OF_NUMBERS, *_OF_NULLS, *_OF_TEXT))
"""Those that cannot make a value much larger than what they are given."""


@dataclass(frozen=True)
class Table:
    """rows: tuples of numbers or text, as many as there are columns; columns: SQL identifiers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


def run_query(query: str, table: Table) -> list[tuple[Any, ...]] | None:
    """The rows of one SELECT over `table`, named `data`; None for anything else.

    Anything else is: no valid SQL, several statements, a statement that writes, attaches, sets a
    pragma or recurses, a function outside a short list, more than MAX_STEPS instructions or
    MAX_LENGTH characters. The table is made anew for every query, in memory. Columns compare text
    without regard to case, and numbers as numbers however they are quoted.
    """
    if len(query) > MAX_LENGTH:
        return None
    with closing(sqlite3.connect(":memory:")) as connection:
        cursor = connection.cursor()
        columns = ", ".join(f'"{name}" NUMERIC COLLATE NOCASE' for name in table.columns)
        cursor.execute(f"CREATE TABLE {TABLE} ({columns})")
        places = ", ".join("?" for _ in table.columns)
        cursor.executemany(f"INSERT INTO {TABLE} VALUES ({places})", table.rows)
        connection.commit()
        cursor.execute("PRAGMA query_only = ON")
        connection.set_authorizer(_authorize)
        steps = 0

        def too_long() -> bool:
            nonlocal steps
            steps += _STEPS_BETWEEN_CHECKS
            return steps > MAX_STEPS

        connection.set_progress_handler(too_long, _STEPS_BETWEEN_CHECKS)
        try:
            found = cursor.execute(query)
            if found.description is None:  # an empty statement, or a comment
                return None
            return found.fetchall()
        # ValueError: characters that no statement may have
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError):
            return None


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action in _ALLOWED:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FUNCTIONS:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def identifiers(names: Sequence[str]) -> tuple[str, ...]:
    """Columns' names as SQL identifiers that need no quotes, each another one: "To par" →
    to_par.
    """
    found: list[str] = []
    for name in names:
        plain = re.sub(r"[\W_]+", "_", name.lower()).strip("_") or "column"
        plain = f"c_{plain}" if plain[0].isdigit() else plain
        plain = plain if _is_plain(plain) else f"{plain}_"
        number = 2
        unique = plain
        while unique in found:
            unique, number = f"{plain}_{number}", number + 1
        found.append(unique)
    return tuple(found)


@cache
def _is_plain(name: str) -> bool:
    """Whether a column may be called so without quotes (`order` may not)."""
    with closing(sqlite3.connect(":memory:")) as connection:
        try:
            connection.execute(f"CREATE TABLE {TABLE} ({name} TEXT)")
            connection.execute(f"INSERT INTO {TABLE} VALUES ('x')")
            return connection.execute(f"SELECT {name} FROM {TABLE}").fetchall() == [("x",)]
        except sqlite3.Error:
            return False
