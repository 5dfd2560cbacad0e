"""This package's tasks as suites of a bench: quality is then the task's score, not agreement with
the full model's tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from multirate.errors import UserError
from multirate.io import spread
from multirate.lab.bench.suites import Question
from multirate.lab.evaluation.task_files import load_tasks, local_tasks

METRICS = {"wikisql": "execution_match", "e2e_nlg": "bleu", "dialogsum": "rougeL"}
"""Of each task the score that its quality is measured by: higher is better."""


@dataclass(frozen=True)
class TaskSuite:
    """questions: one for each document, without examples. metric: what quality is measured by."""

    questions: list[Question]
    metric: str
    task: Any
    documents: Mapping[str, Any]

    def scores(self, answers: Mapping[str, str]) -> dict[str, float]:
        """The task's metrics over the answers. answers: by a question's id; what follows their
        first line is not counted.
        """
        each: dict[str, list[Any]] = {}
        for name, answer in answers.items():
            line = answer.strip().split("\n")[0]
            for metric, value in self.task.process_results(self.documents[name], [line]).items():
                each.setdefault(metric, []).append(value)
        combine = self.task.aggregation()
        return {metric: float(combine[metric](values)) for metric, values in each.items()}


def is_task(suite: str) -> bool:
    return suite in local_tasks()


def load_task_suite(name: str, data: str | os.PathLike[str], limit: int | None = None) -> TaskSuite:
    """The test documents of a task, `limit` of them, spread evenly, asked as `multirate eval
    --shots 0` asks them.

    data: the folder of the tasks' files. Raises UserError as task_files.load_tasks, and for a limit
    below 1.
    """
    if limit is not None and limit < 1:
        raise UserError(f"the limit of prompts is {limit}; accepted: at least 1")
    task = load_tasks([name], data, shots=0)["tasks"][name]
    documents = {f"{name}/{i}": one for i, one in enumerate(spread(list(task.test_docs()), limit))}
    questions = []
    for identity, document in documents.items():
        turns = messages(task, document)
        system = "\n\n".join(one["content"] for one in turns if one["role"] == "system")
        asked = tuple(one["content"] for one in turns if one["role"] == "user")
        questions.append(Question(identity, asked, system=system or None))
    return TaskSuite(questions, METRICS[name], task, documents)


def messages(task: Any, document: Any) -> list[dict[str, str]]:
    """A document's question as the turns of a chat, as the harness would have the chat template
    write them; without examples.
    """
    text = task.fewshot_context(
        document,
        num_fewshot=0,
        apply_chat_template=True,
        fewshot_as_multiturn=True,
        chat_template=lambda turns, **_: json.dumps(turns),
    )
    turns: list[dict[str, str]] = json.loads(text)
    return turns
