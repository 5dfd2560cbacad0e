"""Which prompts an accelerator was trained on, kept as hashes beside it: enough to find a question
of a benchmark among them, and not enough to read them.

    python -m multirate.training.prompt_fingerprints FOLDER FILE...

adds them to an accelerator's folder that has none yet, from the files that it was trained on.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from multirate.errors import UserError
from multirate.io import write_atomically
from multirate.training.data import normalised, prompt_of, read_conversations
from multirate.training.description import read_description

PROMPTS, CHECKSUM, DESCRIPTION = "prompts.safetensors", "prompts_sha256", "accelerator.json"
_TENSOR = "fingerprints"


def prompt_fingerprint(text: str) -> int:
    """64 bits of a prompt, whatever its case and white space; signed, as tensors hold it."""
    digest = hashlib.sha256(normalised(text).encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def packed(fingerprints: Iterable[int]) -> tuple[bytes, str]:
    """A safetensors file of them, int64 [n], and its sha256."""
    content = save({_TENSOR: torch.tensor(sorted(fingerprints), dtype=torch.int64, device="cpu")})
    return content, hashlib.sha256(content).hexdigest()


def read_fingerprints(folder: Path, description: dict[str, Any]) -> frozenset[int] | None:
    """Those beside an accelerator; None: it has none, so nobody knows. UserError for a file that is
    not the one that accelerator.json describes.
    """
    if CHECKSUM not in description:
        return None
    path = folder / PROMPTS
    try:
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != description[CHECKSUM]:
            raise ValueError("another checksum")
        return frozenset(load(content)[_TENSOR].tolist())
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{path} is not the file that {DESCRIPTION} describes ({reason}); download or train "
            "the accelerator again."
        ) from None


def add_fingerprints(folder: Path, files: Sequence[Path]) -> int:
    """Writes those of all prompts of `files` beside the accelerator in `folder` → how many. The
    description comes last, as when an accelerator is saved.
    """
    path = folder / DESCRIPTION
    try:
        description = read_description(path, path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from None
    known = {
        prompt_fingerprint(prompt_of(conversation))
        for file in files
        for conversation in read_conversations(file)
    }
    content, description[CHECKSUM] = packed(known)
    write_atomically(folder / PROMPTS, content)
    write_atomically(path, json.dumps(description, indent=2) + "\n")
    return len(known)


if __name__ == "__main__":
    try:
        print(add_fingerprints(Path(sys.argv[1]), [Path(file) for file in sys.argv[2:]]))
    except UserError as error:
        sys.exit(f"error: {error}")
