"""Reads accelerator.json as what it is: a file that may come from anywhere.

Every field that the library uses is checked here, before anything is built from it.
"""

from __future__ import annotations

import math
import reprlib
from pathlib import Path
from typing import Any

from multirate.errors import UserError
from multirate.io import parse_json

FORMAT = 1
MAX_BYTES = 1 << 22
"""Of the file: a few kilobytes are usual."""
_KINDS = {
    "format": (int, "a whole number"),
    "method": (str, "text"),
    "config": (dict, "an object"),
    "base": (dict, "an object"),
    "weights_sha256": (str, "text"),
    "training": (dict, "an object"),
    "results": (dict, "an object"),
}
_OPTIONAL = ("training", "results")
_COUNT = f"a whole number from 0 to {1 << 20}"


def read_description(path: Path, content: bytes) -> dict[str, Any]:
    """The checked object in ``content``, the bytes of ``path``.

    Raises UserError naming the file, the field, its value and what is accepted.
    """
    if len(content) > MAX_BYTES:
        raise UserError(f"{path} has {len(content)} bytes; accepted: at most {MAX_BYTES}.")
    try:
        description = parse_json(content, path)
    except UserError as error:
        raise UserError(f"{error}; fetch or train it again.") from None
    if not isinstance(description, dict):
        raise UserError(f"{path} has no valid field 'format'; it is not a multirate accelerator.")
    for name in _OPTIONAL:
        description.setdefault(name, {})
    for name, (kind, accepted) in _KINDS.items():
        if not isinstance(description.get(name), kind):
            found = (
                f"it is {reprlib.repr(description[name])}"
                if name in description
                else "it is missing"
            )
            raise UserError(
                f"{path} has no valid field '{name}' ({found}; accepted: {accepted}); "
                "it is not a multirate accelerator."
            )
    if description["format"] != FORMAT:
        found = reprlib.repr(description["format"])
        raise UserError(f"{path}: field 'format' is {found}; this version reads {FORMAT}.")
    _check_results(path, description["results"])
    return description


def _check_results(path: Path, results: dict[str, Any]) -> None:
    """The held-out figures: drafting takes its first guess of the acceptance from them."""
    terms = results.get("terms")
    if terms is None:
        return
    if not isinstance(terms, list):
        _refuse(path, "results.terms", terms, "a list of objects")
    for number, term in enumerate(terms):
        where = f"results.terms[{number}]"
        if not isinstance(term, dict):
            _refuse(path, where, term, "an object")
        for name in ("gate", "draft_step"):
            value = term.get(name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1 << 20:
                _refuse(path, f"{where}.{name}", value, _COUNT)
        value = term.get("agreement")
        if not _is_number(value) or not 0 <= value <= 1:
            _refuse(path, f"{where}.agreement", value, "a number from 0 to 1")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _refuse(path: Path, field: str, value: Any, accepted: str) -> None:
    raise UserError(f"{path}: field '{field}' is {reprlib.repr(value)}; accepted: {accepted}.")
