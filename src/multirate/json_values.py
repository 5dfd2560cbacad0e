"""Checks the content of a JSON file against a dataclass's fields and types.

The dataclass itself checks ranges, and fields that must agree, in `__post_init__`.
"""

from __future__ import annotations

import math
import reprlib
import types
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from multirate.errors import UserError

T = TypeVar("T")
_SHOWN = 120  # characters of a value in a message
_MOST = 1 << 63
"""Limit of whole numbers, which are stored in 64 bits."""


def read_as(kind: type[T], data: Any, path: Path, place: str) -> T:
    """The dataclass `kind` from the JSON object `data`; unknown fields are ignored.

    Raises UserError naming the file at `path` and the field of `place` that is missing, has another
    type or is out of range.
    """

    def refuse(field: str, value: Any, accepted: str) -> NoReturn:
        found = reprlib.repr(value)
        if len(found) > _SHOWN:  # reprlib limits each part, not the whole
            found = found[: _SHOWN - 3] + "..."
        raise UserError(f"{path}: field '{field}' is {found}; accepted: {accepted}.")

    if not isinstance(data, dict):
        refuse(place, data, "an object")
    hints = get_type_hints(kind)
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]
        value = data.get(field.name)
        needed = field.default is MISSING and field.default_factory is MISSING
        if (needed or field.name in data) and not accepts(value, hints[field.name]):
            refuse(f"{place}.{field.name}", value, spell(hints[field.name]))
        if field.name in data:
            values[field.name] = _with_tuples(value, hints[field.name])
    try:
        return kind(**values)
    except UserError as error:
        raise UserError(f"{path}: {place}: {error}") from None


def accepts(value: Any, hint: Any) -> bool:
    """Whether a JSON value has this type."""
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(accepts(value, part) for part in get_args(hint))
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in get_args(hint))
    if origin in (tuple, list):
        of, *rest = get_args(hint)
        if not isinstance(value, (list, tuple)):
            return False
        if origin is tuple and rest and rest != [Ellipsis] and len(value) != 1 + len(rest):
            return False
        return all(accepts(one, of) for one in value)
    if origin is dict:
        return isinstance(value, dict)
    if hint is float:
        return is_number(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and -_MOST <= value < _MOST
    return isinstance(value, hint)


def is_number(value: Any) -> bool:
    """Whether it is a finite number that fits a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        return False


def spell(hint: Any) -> str:
    """A type in words."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(spell(part) for part in get_args(hint))
    if origin is Literal:
        return ", ".join(repr(v) for v in get_args(hint))
    if origin in (tuple, list):
        return f"a list of {spell(get_args(hint)[0])}"
    return {
        int: "a whole number of at most 63 bits",
        float: "a number",
        bool: "true or false",
        str: "text",
        types.NoneType: "null",
        dict: "an object",
    }.get(origin or hint, str(hint))


def _with_tuples(value: Any, hint: Any) -> Any:
    """Converts lists to tuples where the type asks for them."""
    if get_origin(hint) is tuple and isinstance(value, (list, tuple)):
        return tuple(_with_tuples(one, get_args(hint)[0]) for one in value)
    return value
