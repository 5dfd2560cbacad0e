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
from multirate.training.checkpoint import CARD, DESCRIPTION, WEIGHTS
from multirate.training.custom_generate_loader import CUSTOM_GENERATE
from multirate.training.description import read_description
from multirate.training.divergence import not_finite
from multirate.training.prompt_fingerprints import PROMPTS

STATE = "training_state.pt"
PEAK = "setting lr"
"""The entry of the identity that may be lower in a resumed run, so that a diverged run can
continue.
"""


def prepare_output(directory: Path, overwrite: bool) -> None:
    """Make the output folder and prove that it can be written, before any work. UserError
    otherwise, and for a folder with files of these names that are no accelerator's.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):  # each process of a run its own
            pass
    except OSError as error:
        raise UserError(
            f"cannot write to the output folder {directory}: {str(error.strerror).lower()}"
        ) from None
    if (directory / STATE).exists():
        return
    description = directory / DESCRIPTION
    if description.exists():
        if not overwrite:
            raise UserError(
                f"output folder {directory} already holds a finished accelerator; name another "
                "folder, or overwrite it (--overwrite)"
            )
        try:
            read_description(description, description.read_bytes())  # what is replaced is one
        except OSError as error:
            raise UserError(f"cannot read {description}: {error.strerror}.") from None
        return
    for name in (WEIGHTS, CARD, PROMPTS, CUSTOM_GENERATE):
        if (directory / name).exists():
            raise UserError(
                f"{directory / name} exists and does not belong to an accelerator, so it is not "
                "replaced; name another output folder"
            )


def save_state(directory: Path, state: dict[str, Any]) -> None:
    """Tensors and plain values only: it is read back without unpickling code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(directory / STATE, buffer.getvalue())


def load_state(directory: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The state of an interrupted run, None if there is none. Raises UserError if it belongs to
    another run.

    ``identity`` is compared entry by entry with what the state was saved with; the learning rate
    may be lower.
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
            f"cannot read {path} (truncated or damaged); delete it to start over."
        ) from None
    for name in identity:
        lowered = (
            name == PEAK and isinstance(saved.get(PEAK), float) and saved[PEAK] > identity[PEAK]
        )
        if saved.get(name) != identity[name] and not lowered:
            raise UserError(
                f"{path} belongs to a run with another {name} ({saved.get(name)} instead of "
                f"{identity[name]}); use the same value, name another output folder, or delete "
                "the file."
            )
    wrong = not_finite({"stream": state["stream"], "optimizers": state["optimizers"]})
    if wrong is not None:
        raise UserError(
            f"cannot resume from {path}: '{wrong}' is not finite; delete it to start over"
        )
    return state


def remove_state(directory: Path) -> None:
    (directory / STATE).unlink(missing_ok=True)
