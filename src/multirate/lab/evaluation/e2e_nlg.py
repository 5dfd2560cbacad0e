"""E2E: a restaurant's attributes, to be put into one or two sentences.

Read from the challenge's `testset_w_refs.csv` (references of the same meaning are one document) and
`devset.csv` (few-shot prompts, and what a model may be tuned on).
"""

from __future__ import annotations

import csv
import io
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multirate.errors import UserError
from multirate.io import read_text, spread
from multirate.lab.evaluation import slots
from multirate.lab.evaluation.data_folder import data_file
from multirate.lab.evaluation.metrics import slot_errors

TASK, FILE, EXAMPLES_FILE = "e2e_nlg", "testset_w_refs.csv", "devset.csv"
EXAMPLES = 16
"""Meanings kept for few-shot prompts, spread over their file: people's references leave much out,
and these have one that states everything."""
SEED = 0
"""Of the order of the documents: the file begins with the shortest meanings of one place."""


def documents(data: str | os.PathLike[str] | None = None, **_: Any) -> dict[str, Any]:
    """The splits for the harness: `test`; `examples` for few-shot prompts; and `training`, to tune
    a model on, whose documents have one reference each: those without a slot error.

    A document: meaning, references (a list), target (the one with the fewest slot errors). Raises
    UserError naming the file, line and field that cannot be used.
    """
    from datasets import Dataset

    test = _documents(data_file(data, TASK, FILE))
    random.Random(SEED).shuffle(test)
    examples = _documents(data_file(data, TASK, EXAMPLES_FILE))
    whole = [one for one in examples if _errors(one["target"], one["meaning"]) == 0]
    training = [
        {"meaning": one["meaning"], "references": [text], "target": text}
        for one in whole
        for text in one["references"]
        if _errors(text, one["meaning"]) == 0
    ]
    random.Random(SEED).shuffle(training)
    return {
        "test": Dataset.from_list(test),
        "examples": Dataset.from_list(spread(whole or examples, EXAMPLES)),
        "training": Dataset.from_list(training or examples),
    }


def _documents(path: Path) -> list[dict[str, Any]]:
    return [
        {
            "meaning": meaning,
            "references": references,
            "target": min(references, key=lambda text: _errors(text, meaning)),
        }
        for meaning, references in read(path).items()
    ]


def _errors(text: str, meaning: str) -> int:
    return slot_errors(text, slots.parse_meaning(meaning))[0]


def scores(document: Mapping[str, Any], answers: Sequence[str]) -> dict[str, Any]:
    answer = " ".join(answers[0].split())
    return {
        "bleu": (answer, list(document["references"])),
        "slot_error_rate": slot_errors(answer, slots.parse_meaning(document["meaning"])),
    }


def read(path: Path) -> dict[str, list[str]]:
    """{meaning: its references} of a file with the columns mr and ref."""
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
    found: dict[str, list[str]] = {}
    try:
        if not {"mr", "ref"} <= set(reader.fieldnames or ()):
            raise UserError(f"{path} has the columns {reader.fieldnames}; it needs mr and ref")
        for record in reader:
            meaning, reference = record["mr"], record["ref"]
            if not meaning or not reference:
                raise UserError(f"{path}, line {reader.line_num}: mr or ref is empty")
            if meaning not in found:
                _check(meaning, f"{path}, line {reader.line_num}")
            found.setdefault(meaning, []).append(" ".join(reference.split()))
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not valid CSV ({error})") from None
    if not found:
        raise UserError(f"{path} has no records")
    return found


def _check(meaning: str, where: str) -> None:
    """UserError, begun by `where`, for a meaning whose slots could not be looked for."""
    try:
        parsed = slots.parse_meaning(meaning)
    except ValueError as error:
        raise UserError(f"{where}: mr cannot be read: {error}") from None
    for slot, value in parsed.items():
        accepted = slots.values(slot)
        if accepted is not None and value not in accepted:
            known = ", ".join(accepted) or "no such slot"
            raise UserError(f"{where}: mr has {slot}[{value}]; accepted: {known}")
