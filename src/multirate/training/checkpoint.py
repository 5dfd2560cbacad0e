"""A trained accelerator on disk: accelerator.safetensors + accelerator.json + README.md (its model card)."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from multirate.errors import UserError
from multirate.methods.common.config import MethodConfig
from multirate.methods.common.shape import BaseShape
from multirate.methods.spec import find_training
from multirate.training.custom_generate_loader import write_custom_generate
from multirate.training.fingerprint import fingerprint
from multirate.training.model_card import model_card

WEIGHTS, DESCRIPTION, CARD = "accelerator.safetensors", "accelerator.json", "README.md"
FORMAT = 1


def describe_base(model: Any, name: str = "") -> dict[str, Any]:
    """What identifies a base model: sizes and the fingerprint of its weights. ``name``: a hub id or a folder's name."""
    shape = BaseShape.of(model.config)
    return {"name": name, "architecture": shape.architecture, "num_layers": shape.num_layers,
            "hidden_size": shape.hidden_size, "vocab_size": shape.vocab_size, "fingerprint": fingerprint(model)}


def write_atomically(path: Path, data: bytes) -> None:
    """The whole of ``data`` or nothing appears at ``path``. UserError when it cannot be written (space, permission)."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as handle:
            temporary = handle.name
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None


@dataclass
class Accelerator:
    """A trained method's modules with the config, the base they fit, and where they come from."""

    method: str
    config: MethodConfig
    module: nn.Module
    base: dict[str, Any]
    training: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)

    def parameters(self) -> int:
        """Number of trained values."""
        return sum(p.numel() for p in self.module.parameters())

    def save_pretrained(self, directory: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write weights (floating point as ``dtype``), description and model card; each file appears whole.

        The description comes last and holds the weights' checksum: an interrupted save is recognised on load.
        """
        directory = Path(directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"Folder {directory} cannot be made: {error.strerror}.") from None
        tensors = {name: (t.to(dtype) if t.is_floating_point() else t).contiguous().cpu()
                   for name, t in self.module.state_dict().items()}
        weights = save(tensors, metadata={"format": "pt"})
        description = {
            "format": FORMAT, "method": self.method, "config": self.config.to_json(), "base": self.base,
            "parameters": self.parameters(), "weights_sha256": hashlib.sha256(weights).hexdigest(),
            "training": self.training, "results": self.results}
        write_atomically(directory / WEIGHTS, weights)
        write_atomically(directory / CARD, model_card(description).encode())
        write_custom_generate(directory)
        write_atomically(directory / DESCRIPTION, (json.dumps(description, indent=2) + "\n").encode())

    @staticmethod
    def from_pretrained(source: str | Path, model: Any, dtype: torch.dtype | None = None) -> Accelerator:
        """Load from a folder or a hub id for the base ``model`` it was trained on, as ``dtype`` (default: the model's).

        Raises UserError naming what is wrong: missing or damaged file, unknown method, or every respect in which
        ``model`` is not the base the accelerator was trained for.
        """
        directory = _folder(source)
        description = _description(directory / DESCRIPTION)
        training = find_training(description["method"])
        config = training.config.from_json(description["config"])
        _check_base(directory, description["base"], model)
        weights = _read(directory / WEIGHTS)
        if hashlib.sha256(weights).hexdigest() != description["weights_sha256"]:
            raise UserError(f"{directory / WEIGHTS} is not the file that {DESCRIPTION} describes (another checksum: "
                            "truncated, damaged or from another save); fetch or train it again.")
        try:
            tensors = load(weights)
        except (SafetensorError, ValueError, KeyError) as error:
            raise UserError(f"{directory / WEIGHTS} is not a readable safetensors file ({error}).") from None
        module = training.build(config, BaseShape.of(model.config))
        expected = {name: tuple(t.shape) for name, t in module.state_dict().items()}
        found = {name: tuple(t.shape) for name, t in tensors.items()}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise UserError(f"{directory / WEIGHTS}: tensor '{name}' has shape {found.get(name, 'missing')}; "
                                f"the config needs {expected.get(name, 'no such tensor')}.")
        module.load_state_dict(tensors)
        first = next(iter(model.parameters()))
        module.to(device=first.device, dtype=dtype or first.dtype).eval().requires_grad_(False)
        return Accelerator(description["method"], config, module, description["base"], description.get("training", {}),
                           description.get("results", {}))


def _folder(source: str | Path) -> Path:
    from multirate.hub import resolve_accelerator

    path = Path(source)
    return path if path.is_dir() else resolve_accelerator(source)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; an accelerator folder holds {DESCRIPTION} "
                        f"and {WEIGHTS}.") from None


def _description(path: Path) -> dict[str, Any]:
    try:
        description = json.loads(_read(path))
    except ValueError:
        raise UserError(f"{path} is not valid JSON (truncated or damaged); fetch or train it again.") from None
    needed = {"format": int, "method": str, "config": dict, "base": dict, "weights_sha256": str}
    for name, kind in needed.items():
        if not isinstance(description, dict) or not isinstance(description.get(name), kind):
            raise UserError(f"{path} has no valid field '{name}'; it is not a multirate accelerator.")
    if description["format"] != FORMAT:
        raise UserError(f"{path}: field 'format' is {description['format']}; this version reads {FORMAT}.")
    return description


def _check_base(directory: Path, trained_for: dict[str, Any], model: Any) -> None:
    here = describe_base(model)
    wrong = [f"{name} {here[name]} instead of {trained_for.get(name)}"
             for name in ("architecture", "num_layers", "hidden_size", "vocab_size")
             if here[name] != trained_for.get(name)]
    if not wrong and here["fingerprint"] != trained_for.get("fingerprint"):
        wrong = ["other weights (another revision or a fine-tuned copy: fingerprint "
                 f"{here['fingerprint'][:8]} instead of {str(trained_for.get('fingerprint'))[:8]})"]
    if wrong:
        name = trained_for.get("name") or "another model"
        raise UserError(f"The accelerator in {directory} was trained for {name} and does not fit this model: "
                        f"{'; '.join(wrong)}.")
