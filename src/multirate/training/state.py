"""The resumable state of an unfinished run: one file, written atomically, that a restart picks
up.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import torch

from multirate.errors import UserError
from multirate.io import write_atomically
from multirate.training.checkpoint import DESCRIPTION
from multirate.training.divergence import not_finite

STATE = "training_state.pt"


def prepare_output(directory: Path, overwrite: bool) -> None:
    """Make the output folder and prove that it can be written, before any work. UserError
    otherwise.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):  # each process of a run its own
            pass
    except OSError as error:
        raise UserError(f"Output folder {directory} cannot be written: {error.strerror}.") from None
    if (directory / DESCRIPTION).exists() and not (directory / STATE).exists() and not overwrite:
        raise UserError(
            f"Output folder {directory} already holds a finished accelerator; name another "
            "folder or set overwrite."
        )


def save_state(directory: Path, state: dict[str, Any]) -> None:
    """Tensors and plain values only: it is read back without unpickling code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(directory / STATE, buffer.getvalue())


def load_state(directory: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The state of an interrupted run, None when there is none; UserError when it belongs to
    another run.

    ``identity`` is compared entry by entry with what the state was saved with.
    """
    path = directory / STATE
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        saved = dict(state["identity"])
        state["stream"], state["optimizers"], state["step"], state["tokens"], state["seconds"]
    except Exception:
        raise UserError(
            f"{path} cannot be read (truncated or damaged); delete it to start over."
        ) from None
    for name in identity:
        if saved.get(name) != identity[name]:
            raise UserError(
                f"{path} belongs to a run with another {name} ({saved.get(name)} instead of "
                f"{identity[name]}); use the same, another output folder, or delete the file."
            )
    name = not_finite({"stream": state["stream"], "optimizers": state["optimizers"]})
    if name is not None:
        raise UserError(
            f"{path} cannot be gone on from: '{name}' is not finite; delete it to start over"
        )
    return state


def remove_state(directory: Path) -> None:
    """The run is finished."""
    (directory / STATE).unlink(missing_ok=True)
