"""Prompts from local files in the formats of the public suites. Nothing is downloaded."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multirate.errors import UserError
from multirate.io import decoded, parse_json, spread


@dataclass(frozen=True)
class Question:
    """What a user asks: one string per turn. A later turn is asked after the model's own answer to
    the one before. system: what the conversation begins with. where: the file and line it is from.
    """

    id: str
    turns: tuple[str, ...]
    category: str | None = None
    system: str | None = None
    where: str = field(default="", compare=False)


class _Field(Exception):
    """A record that lacks what its suite needs; the reader adds file and line."""


def _text(record: dict[str, Any], field: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise _Field(f"needs a non-empty string field {field!r}")
    return value


def _fastchat(record: dict[str, Any]) -> list[tuple[str, ...]]:
    turns = record.get("turns")
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(t, str) and t.strip() for t in turns)
    ):
        raise _Field("needs a field 'turns' holding a list of non-empty strings")
    return [tuple(turns)]


def _self_instruct(record: dict[str, Any]) -> list[tuple[str, ...]]:
    instruction = _text(record, "instruction")
    instances = record.get("instances", [{}])
    if (
        not isinstance(instances, list)
        or not instances
        or not all(isinstance(i, dict) for i in instances)
    ):
        raise _Field("needs 'instances' to be a non-empty list of objects with an 'input'")
    prompts: list[tuple[str, ...]] = []
    for instance in instances:
        given = instance.get("input") or ""
        if not isinstance(given, str):
            raise _Field("needs every instances[].input to be a string")
        prompts.append((f"{instruction}\n\n{given}" if given.strip() else instruction,))
    return prompts


def _single(field: str) -> Callable[[dict[str, Any]], list[tuple[str, ...]]]:
    return lambda record: [(_text(record, field),)]


MULTI_TURN = "multi_turn"
"""Spec-Bench's task of MT-Bench's questions, whose categories the file gives instead."""
_MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
_NAMES = ("question_id", "task_id", "id")
READERS: dict[str, Callable[[dict[str, Any]], list[tuple[str, ...]]]] = {
    "mt_bench": _fastchat,
    "spec_bench": _fastchat,
    "self_instruct": _self_instruct,
    "koala": _single("prompt"),
    "wizardlm": _single("Instruction"),
    "gsm8k": _single("question"),
    "humaneval": _single("prompt"),
    "text": _single("text"),
}


def load_suite(
    suite: str, path: str | Path, limit: int | None = None, task: str | None = None
) -> list[Question]:
    """The questions of a JSONL file (`.gz`: compressed) in the format of `suite` (a key of
    READERS); of the category `task` only, where one is named; `limit` of them, spread evenly.

    Suites are ordered by category: the first few would say little about the whole. Raises UserError
    for an unknown suite, an unreadable or empty file, or a malformed line (file and line number).
    """
    if suite not in READERS:
        raise UserError(f"unknown suite {suite!r}; accepted: {', '.join(READERS)}")
    if limit is not None and limit < 1:
        raise UserError(f"--limit is {limit}: at least 1 is needed")
    questions = list(_read(READERS[suite], suite, Path(path)))
    if not questions:
        raise UserError(f"{path} has no questions: a {suite} file has one JSON object per line")
    if task is not None:
        found = sorted({q.category for q in questions if q.category is not None})
        questions = [q for q in questions if q.category == task]
        if not questions:
            raise UserError(
                f"{path} has no questions of category {task!r}; accepted: "
                f"{', '.join(found) or 'none, because its records have no category'}"
            )
    return spread(questions, limit)


def _read(
    reader: Callable[[dict[str, Any]], list[tuple[str, ...]]], suite: str, path: Path
) -> Iterator[Question]:
    for number, record in read_jsonl(path):
        try:
            prompts = reader(record)
        except _Field as error:
            raise UserError(
                f"{path}, line {number} does not fit suite {suite}: it {error}"
            ) from None
        name = str(next((record[f] for f in _NAMES if f in record), number))
        category = record.get("category")
        if suite == "spec_bench" and category in _MT_BENCH:
            category = MULTI_TURN
        for index, turns in enumerate(prompts):
            yield Question(
                id=name if len(prompts) == 1 else f"{name}.{index}",
                turns=turns,
                category=category if isinstance(category, str) else None,
                where=f"{path}, line {number}",
            )


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of every non-blank line. UserError names file and line of what
    is no JSON object.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    with file:
        try:
            compressed = path.suffix == ".gz"
            lines: Iterable[bytes] = gzip.GzipFile(fileobj=file) if compressed else file
            for number, raw in enumerate(lines, start=1):
                line = decoded(raw, f"{path}, line {number}").strip()
                if not line:
                    continue
                record = parse_json(line, f"{path}, line {number}")
                if not isinstance(record, dict):
                    raise UserError(
                        f"{path}, line {number}: expected a JSON object, found "
                        f"{type(record).__name__}"
                    )
                yield number, record
        # a folder opens on some systems and fails only when read, as does what is not compressed
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(f"cannot read {path}: {reason.lower()}") from None
