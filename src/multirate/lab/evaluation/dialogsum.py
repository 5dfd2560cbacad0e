"""DialogSum: a dialogue of daily life, to be summarised.

Read from `dialogsum.test.jsonl` (three summaries each) and `dialogsum.dev.jsonl` (few-shot
prompts, and what a model may be tuned on).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multirate.errors import UserError
from multirate.io import spread
from multirate.lab.bench.suites import read_jsonl
from multirate.lab.evaluation.data_folder import data_file
from multirate.lab.evaluation.metrics import rouge

TASK, FILE, EXAMPLES_FILE = "dialogsum", "dialogsum.test.jsonl", "dialogsum.dev.jsonl"
EXAMPLES = 16
"""Dialogues kept for few-shot prompts: short ones, spread over their file."""
SHORT = 600
"""Characters of a short dialogue."""


def documents(data: str | os.PathLike[str] | None = None, **_: Any) -> dict[str, Any]:
    """The splits for the harness: `test`; `training`, to tune a model on; and `examples` for
    few-shot prompts, some of the latter.

    A document: dialogue, references (a list), target (the first of them). Raises UserError naming
    the file, line and field that cannot be used.
    """
    from datasets import Dataset

    examples = read(data_file(data, TASK, EXAMPLES_FILE))
    short = [one for one in examples if len(one["dialogue"]) <= SHORT]
    return {
        "test": Dataset.from_list(read(data_file(data, TASK, FILE))),
        "examples": Dataset.from_list(spread(short or examples, EXAMPLES)),
        "training": Dataset.from_list(examples),
    }


def scores(document: Mapping[str, Any], answers: Sequence[str]) -> dict[str, float]:
    return rouge(answers[0].strip(), document["references"])


def read(path: Path) -> list[dict[str, Any]]:
    """The documents of a file whose records have dialogue, and summary or summary1, summary2 …"""
    found = []
    for number, record in read_jsonl(path):
        dialogue = record.get("dialogue")
        references = [value for name, value in sorted(record.items()) if name.startswith("summary")]
        texts = [dialogue, *references]
        if not references or not all(isinstance(text, str) and text.strip() for text in texts):
            raise UserError(
                f"{path}, line {number}: needs non-empty text in 'dialogue', and in 'summary' or "
                "'summary1', 'summary2' …"
            )
        found.append({"dialogue": dialogue, "references": references, "target": references[0]})
    if not found:
        raise UserError(f"{path} has no records")
    return found
