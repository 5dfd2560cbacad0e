"""Tasks by name: those of this package, the harness's own, or a YAML file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multirate.errors import UserError, first_line
from multirate.lab.evaluation.installed import check_installed

FOLDER = Path(__file__).parent / "tasks"
_YAML = (".yaml", ".yml")


def local_tasks() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def task_names(text: str) -> list[str]:
    """A comma-separated list, without repetitions. UserError where it is empty."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UserError(f"--tasks names no task; accepted: {_accepted()}")
    return names


def load_tasks(
    names: Sequence[str], data: str | os.PathLike[str] | None = None, shots: int | None = None
) -> dict[str, Any]:
    """What the harness's `evaluate` runs, of tasks by name or YAML file.

    data: the folder of this package's tasks. shots: examples in a prompt, in place of the task's
    own number. Raises UserError for an unknown task (the accepted ones are listed), a file that
    cannot be used, data that is not there, and a task that would run code of the model's.
    """
    if shots is not None and shots < 0:
        raise UserError(f"shots is {shots}; accepted: at least 0")
    check_installed()
    from lm_eval.tasks import TaskManager

    metadata = None if data is None else {"data": os.fspath(data)}
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False, metadata=metadata)
    for name in names:
        if Path(name).suffix in _YAML and not Path(name).is_file():
            raise UserError(f"there is no task file {name}; accepted: {_accepted()}")
    others = [n for n in names if n not in local_tasks() and Path(n).suffix not in _YAML]
    if others:
        unknown = next((name for name in others if not _is_written_somewhere(name)), None)
        if unknown is None:  # thousands of files are parsed: tens of seconds
            manager = TaskManager(include_path=str(FOLDER), metadata=metadata)
            unknown = next((name for name in others if name not in manager.task_index), None)
        if unknown is not None:
            raise UserError(f"task {unknown!r} is unknown; accepted: {_accepted()}")
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        try:
            found: Any = manager.load([name])
        except UserError:
            raise
        except Exception as error:  # whatever a file's contents, or a download, may raise
            raise UserError(f"task {name} cannot be loaded: {first_line(error)}") from error
        for kind, values in found.items():
            loaded[kind].update(values)
    for name, task in loaded["tasks"].items():
        _prepare(name, task, shots)
    return loaded


def _prepare(name: str, task: Any, shots: int | None) -> None:
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(f"task {name} runs code that the model writes, which multirate does not do")
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"task {name} has images or sound; accepted: text tasks")
    if shots is not None:
        task.set_config(key="num_fewshot", value=shots)
    elif task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=0)
    wanted = task.get_config("num_fewshot")
    there = 0 if wanted == 0 else len(list(task.fewshot_docs() or ()))
    if wanted > there:
        raise UserError(
            f"task {name} has {there} examples for its prompts, but {wanted} were requested"
        )


def _is_written_somewhere(name: str) -> bool:
    """Whether the harness's own task files have this text: a mistyped name is found fast."""
    import lm_eval.tasks

    folder = Path(lm_eval.tasks.__file__).parent
    return any(name.encode() in path.read_bytes() for path in folder.rglob("*.yaml"))


def _accepted() -> str:
    return (
        f"{', '.join(local_tasks())}, a task's YAML file, or a task of lm-eval itself "
        "(`lm-eval ls tasks` lists them)"
    )
