"""Reads accelerator.json as what it is: a file that may come from anywhere.

Every field that the library uses is checked here, before anything is built from it.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multirate.errors import UserError
from multirate.io import parse_json
from multirate.json_values import read_as

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


def read_description(path: Path, content: bytes) -> dict[str, Any]:
    """The checked object in ``content``, the bytes of ``path``.

    Raises UserError naming the file, the field, its value and what is accepted.
    """
    if len(content) > MAX_BYTES:
        raise UserError(f"{path} has {len(content)} bytes; the maximum is {MAX_BYTES}.")
    try:
        description = parse_json(content, path)
    except UserError as error:
        raise UserError(f"{error}; download or train it again.") from None
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
    if not isinstance(terms, (list, type(None))):
        _refuse(path, "results.terms", terms, "a list of objects")
    for number, term in enumerate(terms or []):
        read_as(_Term, term, path, f"results.terms[{number}]")


@dataclass(frozen=True)
class _Term:
    """How often a draft of `draft_step` tokens was the text, by the gate it was made at."""

    gate: int
    draft_step: int
    agreement: float

    def __post_init__(self) -> None:
        for name, value, most in (
            ("gate", self.gate, 1 << 20),
            ("draft_step", self.draft_step, 1 << 20),
            ("agreement", self.agreement, 1),
        ):
            if not 0 <= value <= most:
                raise UserError(f"{name} is {value}; accepted: a number from 0 to {most}")


def _refuse(path: Path, field: str, value: Any, accepted: str) -> None:
    raise UserError(f"{path}: field '{field}' is {reprlib.repr(value)}; accepted: {accepted}.")
