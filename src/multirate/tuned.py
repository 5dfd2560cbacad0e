"""What `multirate tune` found fastest for a method, a model and a machine, and its file:
beside the accelerator, or in the cache where that folder is not the user's own.
"""

from __future__ import annotations

import hashlib
import os
import reprlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from multirate.errors import UserError, say_once
from multirate.io import cache_folder, read_json, write_json
from multirate.json_values import read_as

FILE, FORMAT = "tuned.json", 1
_PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Tuned:
    """settings: of the method, the fastest that were tried. base, accelerator: fingerprint of the
    base's weights, checksum of the accelerator's ("" of a method without). machine: as
    runtime/machine.py names it, with the backend. date, prompts, minutes: of the run; figures: of
    each setting that was tried, the fastest first.
    """

    method: str
    settings: dict[str, Any]
    base: str
    accelerator: str
    machine: str
    date: str
    prompts: str
    minutes: float
    figures: list[dict[str, Any]] = field(default_factory=list, repr=False)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What it was tuned for; a newer entry with the same key replaces it."""
        return self.method, self.base, self.accelerator, self.machine


def place(folder: Path | None, method: str, base: str) -> Path:
    """The file for what is tuned now. folder: the accelerator's; None: the method has none."""
    if folder is not None and os.access(folder, os.W_OK) and _PACKAGE not in folder.parents:
        return folder / FILE
    return _cached(method, base)


def _cached(method: str, base: str) -> Path:
    key = hashlib.sha256(f"{method} {base}".encode()).hexdigest()[:16]
    return cache_folder() / "tuned" / f"{key}.json"


def store(path: Path, tuned: Tuned) -> None:
    """Adds it to the file and replaces an older entry. Raises UserError for a file that cannot be
    used.
    """
    kept = [old for old in read(path) if old.key != tuned.key]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the folder {path.parent}: {error.strerror}") from None
    write_json(path, {"format": FORMAT, "tuned": [asdict(one) for one in [*kept, tuned]]})


def find(
    folder: Path | None, method: str, base: str, accelerator: str, machine: str
) -> Tuned | None:
    """The latest settings tuned for exactly this; None: there are none. A file that cannot be used
    causes a warning and is ignored.
    """
    paths = [_cached(method, base), *([] if folder is None else [folder / FILE])]
    found = [one for path in paths for one in _read_or_say(path)]
    wanted = [one for one in found if one.key == (method, base, accelerator, machine)]
    return max(wanted, key=lambda one: one.date, default=None)


def _read_or_say(path: Path) -> list[Tuned]:
    try:
        return read(path)
    except UserError as error:
        say_once(f"ignoring the tuned settings: {error}")
        return []


def read(path: Path) -> list[Tuned]:
    """The entries of a file; none without it. Raises UserError naming the field that cannot be
    used.
    """
    found = read_json(path)
    if not os.path.exists(path):
        return []
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UserError(f"{path} was not written by multirate tune (format {FORMAT}); delete it")
    tuned = found.get("tuned")
    if not isinstance(tuned, list):
        raise UserError(
            f"{path}: field 'tuned' is {reprlib.repr(tuned)}; accepted: a list; run "
            "multirate tune again"
        )
    return [read_as(Tuned, one, path, f"tuned[{number}]") for number, one in enumerate(tuned)]
