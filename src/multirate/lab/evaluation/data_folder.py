"""Where the tasks' data lies. None of it is part of the package."""

from __future__ import annotations

import os
from pathlib import Path

from multirate.errors import UserError

VARIABLE = "MULTIRATE_EVAL_DATA"


def data_file(folder: str | os.PathLike[str] | None, task: str, name: str) -> Path:
    """The file `name` of a task: FOLDER/TASK/NAME, or FOLDER/NAME where the folder is the task's
    own.

    folder: None: what $MULTIRATE_EVAL_DATA names. Raises UserError naming what is missing.
    """
    given = folder or os.environ.get(VARIABLE)
    if not given:
        raise UserError(
            f"task {task} needs its data; name a folder that has {task}/{name} with --data "
            f"FOLDER or in {VARIABLE}"
        )
    root = Path(given)
    if not root.is_dir():
        raise UserError(f"task {task} needs its data, but there is no folder {root}")
    for path in (root / task / name, root / name):
        if path.is_file():
            return path
    raise UserError(
        f"task {task} needs the file {task}/{name} (or {name}) in {root}, which is not there"
    )
