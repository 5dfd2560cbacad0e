"""Where a GGUF file is found."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from multirate.errors import UserError
from multirate.loading.gguf.file import SUFFIX


def gguf_of_wheel(wheel: str) -> Path | None:
    """The GGUF file that an installed package ("distribution==version") holds; None: there is none.
    Found without importing the package, as what it would import need not be installed.
    """
    try:
        files = importlib.metadata.distribution(wheel.partition("==")[0]).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files)
    return next((path for path in paths if path.suffix == SUFFIX and path.is_file()), None)


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
