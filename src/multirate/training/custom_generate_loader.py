"""The small loader that transformers expects in a folder given as `custom_generate`. Imports
nothing of the engine.
"""

from __future__ import annotations

from pathlib import Path

from multirate.errors import UserError
from multirate.io import write_atomically

_LOADER = '''"""Lossless speed-up of this accelerator's base model: the text is the model's own,
sooner.

model.generate(**inputs, custom_generate="<this folder or its hub id>", trust_remote_code=True)
Further arguments: backend="auto" | "hf" | "native", speculate="auto" | "always" | "never"; and,
where the accelerator is calibrated, mode="dynamic" with quality=0.99 (lossy: that share of the
tokens is the model's).
"""


def generate(model, **arguments):
    from multirate.integration import generate_from_folder

    return generate_from_folder(model, **arguments)
'''
_REQUIREMENTS = "multirate>=0.1.0\n"
CUSTOM_GENERATE = "custom_generate"
"""The folder that it lies in."""


def write_custom_generate(folder: str | Path) -> None:
    """Adds `custom_generate/generate.py` and `requirements.txt` to an accelerator's folder,
    existing ones replaced.
    """
    place = Path(folder) / CUSTOM_GENERATE
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_atomically(place / "generate.py", _LOADER)
        write_atomically(place / "requirements.txt", _REQUIREMENTS)
    except OSError as error:
        raise UserError(f"cannot write {place}: {(error.strerror or str(error)).lower()}") from None
