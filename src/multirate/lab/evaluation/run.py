"""An evaluation: tasks, asked and scored."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from multirate.engine import Engine
from multirate.errors import UserError
from multirate.lab.evaluation.modes import Decoding

BOOTSTRAPS = 1000
"""Draws of the standard errors that have no formula (of the harness's own tasks)."""


@dataclass(frozen=True)
class Score:
    """A metric of a task over `samples` documents. error: its standard error, where it is known."""

    task: str
    metric: str
    value: float
    error: float | None
    higher_is_better: bool | None
    samples: int


@dataclass
class Evaluation:
    """scores: in the order of the tasks. answers: by task, of each document its number, what the
    model said and its own scores; the documents themselves are not kept, as their licences may not
    allow it. work: what decoding took (harness_model.Work). chat: whether prompts went through the
    tokenizer's chat template. shots: examples in a prompt, by task. versions: of harness and tasks.
    """

    scores: list[Score]
    answers: dict[str, list[dict[str, Any]]]
    work: dict[str, Any]
    chat: bool
    shots: dict[str, int]
    versions: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; a score that is no finite number is null."""
        return {
            "tasks": {
                task: {
                    score.metric: {
                        "value": score.value if math.isfinite(score.value) else None,
                        "standard_error": score.error,
                        "higher_is_better": score.higher_is_better,
                    }
                    for score in self.scores
                    if score.task == task
                }
                for task in dict.fromkeys(score.task for score in self.scores)
            },
            "samples": {score.task: score.samples for score in self.scores},
            "chat_template": self.chat,
            "shots": self.shots,
            "versions": self.versions,
            "decoding": self.work,
            "answers": self.answers,
        }


def evaluate(
    engine: Engine,
    decoding: Decoding,
    tasks: dict[str, Any],
    limit: int | None = None,
    chat: bool = True,
    progress: Any = None,
) -> Evaluation:
    """Runs tasks (task_files.load_tasks) in a mode of the engine.

    limit: the first so many documents of each task. chat: ask by the tokenizer's chat template,
    where it has one, examples as turns. progress: as harness_model.Progress. Raises UserError for
    what cannot be used; an interrupted run returns nothing.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}; accepted: at least 1")
    from lm_eval import __version__
    from lm_eval.evaluator import evaluate as run

    from multirate.lab.evaluation.harness_model import EngineLM

    model = EngineLM(engine, decoding, progress)
    templated = chat and bool(getattr(engine.tokenizer, "chat_template", None))
    found = run(
        model,
        tasks,
        limit=limit,
        bootstrap_iters=BOOTSTRAPS,
        log_samples=True,
        apply_chat_template=templated,
        fewshot_as_multiturn=templated,
    )
    work = asdict(model.work)
    stepped = model.work.tokens - model.work.first_tokens
    work["tokens_per_step"] = stepped / model.work.steps if model.work.steps else None
    return Evaluation(
        [score for name in found["results"] for score in _scores(name, found)],
        {name: [_answer(one) for one in samples] for name, samples in found["samples"].items()},
        work,
        templated,
        {name: int(task.get_config("num_fewshot")) for name, task in tasks["tasks"].items()},
        {"lm_eval": __version__, "tasks": dict(found.get("versions", {}))},
    )


def _scores(task: str, found: Any) -> list[Score]:
    """The harness keeps "METRIC,FILTER" and "METRIC_stderr,FILTER"; the filter "none" goes without
    saying.
    """
    values = found["results"][task]
    better = found.get("higher_is_better", {}).get(task, {})
    samples = found.get("n-samples", {}).get(task, {}).get("effective", 0)
    scores = []
    for key, value in values.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        error = values.get(f"{metric}_stderr,{kind}")
        scores.append(
            Score(
                task,
                metric if kind == "none" else key,
                float(value),
                float(error) if isinstance(error, (int, float)) and math.isfinite(error) else None,
                better.get(metric),
                int(samples),
            )
        )
    return scores


def _answer(sample: dict[str, Any]) -> dict[str, Any]:
    """Its own scores are those that are a number: BLEU is of all answers together."""
    scores = {
        metric: sample[metric]
        for metric in sample["metrics"]
        if isinstance(sample.get(metric), (int, float))
    }
    return {"document": sample["doc_id"], "said": sample["filtered_resps"], **scores}


def table(evaluation: Evaluation, title: str) -> Table:
    """A line per task and metric; ↑: higher is better, ↓: lower."""
    result = Table(title=title, title_justify="left", pad_edge=False)
    result.add_column("task", overflow="fold")
    result.add_column("metric", overflow="fold")
    for name in ("score", "± std. error", "samples"):
        result.add_column(name, justify="right")
    before = None
    for score in evaluation.scores:
        direction = {True: " ↑", False: " ↓", None: ""}
        result.add_row(
            score.task if score.task != before else "",
            score.metric + direction[score.higher_is_better],
            f"{score.value:.4f}",
            "-" if score.error is None else f"{score.error:.4f}",
            str(score.samples),
        )
        before = score.task
    return result
