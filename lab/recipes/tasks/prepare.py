"""Writes questions and answers of WikiSQL, E2E and DialogSum, to fine-tune a model and to train its
accelerators.

    python lab/recipes/tasks/prepare.py --data DATA --out runs/tasks

The questions are from the tasks' training splits, in the format of `multirate eval --shots 0`.
Writes tuning.jsonl (for fine-tuning), accelerators.jsonl (the same questions and as many others of
these splits, for the tuned model to answer with `multirate answers`) and calibration.jsonl (a third
part, for `multirate calibrate`). DATA: the data folder of `multirate eval`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multirate.lab.evaluation.task_files import load_tasks, local_tasks
from multirate.lab.evaluation.task_suite import messages

SHARES = {"tuning": 0.6, "accelerators": 0.3, "calibration": 0.1}


def conversations(task: Any) -> list[list[dict[str, str]]]:
    """The training split's documents as turns, with the answer as the last."""
    found = []
    for document in task.training_docs():
        answer = {"role": "assistant", "content": task.doc_to_target(document)}
        found.append([*messages(task, document), answer])
    return found


def split_by_question(
    found: Sequence[list[dict[str, str]]], most: int, draw: random.Random
) -> dict[str, list[list[dict[str, str]]]]:
    """By the names of SHARES. The questions of the first, which has at most `most` answers, are
    those of the second, too; only the first has several answers to a question.
    """
    by_question: dict[str, list[list[dict[str, str]]]] = {}
    for turns in found:
        by_question.setdefault(turns[-2]["content"], []).append(turns)
    questions = list(by_question.values())
    draw.shuffle(questions)
    parts: dict[str, list[list[dict[str, str]]]] = {}
    begin = 0.0
    for name, share in SHARES.items():
        end = begin + share
        part = questions[round(begin * len(questions)) : round(end * len(questions))]
        parts[name] = [turns for one in part for turns in (one if name == "tuning" else one[:1])]
        begin = end
    parts["tuning"] = draw.sample(parts["tuning"], min(most, len(parts["tuning"])))
    parts["accelerators"] += {turns[-2]["content"]: turns for turns in parts["tuning"]}.values()
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most", type=int, default=2400, help="tuning answers of each task")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tasks = load_tasks(local_tasks(), arguments.data)["tasks"]
    draw = random.Random(arguments.seed)
    written: dict[str, list[list[dict[str, str]]]] = {name: [] for name in SHARES}
    for name, task in tasks.items():
        parts = split_by_question(conversations(task), arguments.most, draw)
        print(name, {part: len(turns) for part, turns in parts.items()})
        for part, turns in parts.items():
            written[part] += turns
    arguments.out.mkdir(parents=True, exist_ok=True)
    for part, conversations_ in written.items():
        draw.shuffle(conversations_)
        lines = [json.dumps({"messages": turns}) + "\n" for turns in conversations_]
        (arguments.out / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
