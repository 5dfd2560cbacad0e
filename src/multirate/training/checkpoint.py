"""A trained accelerator on disk: accelerator.safetensors, accelerator.json and README.md (its model
card).
"""

from __future__ import annotations

import errno
import hashlib
import json
import reprlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from multirate.errors import UserError
from multirate.io import write_atomically
from multirate.loading.hub import PUBLISHED
from multirate.methods._shared.config import MethodConfig
from multirate.methods._shared.shape import BaseShape
from multirate.methods.spec import Published, Training, find_training, trainable
from multirate.runtime.quantised import dense, device_of, weight_of
from multirate.torch_modes import own_modes
from multirate.training.custom_generate_loader import write_custom_generate
from multirate.training.description import FORMAT, read_description
from multirate.training.fingerprint import fingerprint
from multirate.training.model_card import model_card
from multirate.training.prompt_fingerprints import CHECKSUM, PROMPTS, packed, read_fingerprints

WEIGHTS, DESCRIPTION, CARD = "accelerator.safetensors", "accelerator.json", "README.md"
EXPORTED = (PUBLISHED, "model.safetensors")
"""The files of a checkpoint in a published layout."""


def describe_base(model: Any, name: str = "") -> dict[str, Any]:
    """What identifies a base model: its sizes and the fingerprint of its weights. ``name``: a hub
    id or a folder's name.
    """
    return {"name": name, **_shape_of(model), "fingerprint": fingerprint(model)}


def _shape_of(model: Any) -> dict[str, Any]:
    shape = BaseShape.of(model.config)
    return {
        "architecture": shape.architecture,
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
    }


@dataclass
class Accelerator:
    """A trained accelerator: its modules and config, the base model they fit, and their origin."""

    method: str
    """Name of its method."""
    config: MethodConfig
    """The method's config, which decides the shapes of the modules."""
    module: nn.Module
    """The trained modules."""
    base: dict[str, Any]
    """The base model: name, sizes and fingerprint of its weights."""
    training: dict[str, Any] = field(default_factory=dict)
    """How it was trained, as in accelerator.json."""
    results: dict[str, Any] = field(default_factory=dict)
    """What it measured on held-out text, as in accelerator.json."""
    other_weights: str | None = None
    """A sentence if the model it was loaded for has the base's shape but other weights (a
    fine-tuned or quantised copy), else None.
    """
    folder: Path | None = None
    """The folder it was loaded from, if any."""
    weights_sha256: str = ""
    """Checksum of the file that its weights were loaded from."""
    prompts: frozenset[int] | None = None
    """Fingerprints of the prompts that it was trained on (prompt_fingerprints.py); None:
    unknown.
    """

    def parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters())

    def check_fits(self, model: Any) -> None:
        """Raises UserError if ``model`` no longer has the base's shape, for example because its
        vocabulary was resized. An accelerator made in memory need not name a base.
        """
        if not self.base:
            return
        which = f"in {self.folder}" if self.folder is not None else self.method
        _check_shape(which, self.base, _shape_of(model))

    def save_pretrained(self, directory: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Writes weights (floating point as ``dtype``), description and model card into a folder.
        Each file appears whole.

        The description comes last and holds the weights' checksum, so loading detects an
        interrupted save. Raises UserError if the folder cannot be written.
        """
        directory = Path(directory)
        tensors = {
            name: (t.to(dtype) if t.is_floating_point() else t).contiguous().cpu()
            for name, t in self.module.state_dict().items()
        }
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"Cannot create the folder {directory}: {error.strerror}.") from None
        weights = save(tensors, metadata={"format": "pt"})
        description = {
            "format": FORMAT,
            "method": self.method,
            "config": self.config.to_json(),
            "base": self.base,
            "parameters": self.parameters(),
            "weights_sha256": hashlib.sha256(weights).hexdigest(),
            "training": self.training,
            "results": self.results,
        }
        if self.prompts is not None:
            prompts, description[CHECKSUM] = packed(self.prompts)
            write_atomically(directory / PROMPTS, prompts)
        write_atomically(directory / WEIGHTS, weights)
        write_atomically(directory / CARD, model_card(description).encode())
        write_custom_generate(directory)
        write_atomically(
            directory / DESCRIPTION, (json.dumps(description, indent=2) + "\n").encode()
        )

    def export(self, directory: str | Path) -> None:
        """Writes it in the layout in which other projects publish this method. Raises UserError if
        there is no such layout, and for a folder that holds another model.
        """
        check_export(directory, overwrite=True)
        published = find_training(self.method).published
        if published is None:
            raise UserError(
                f"method {self.method} has no published layout; accepted: an accelerator of "
                f"{' or '.join((name for name, _ in _layouts()))}"
            )
        published.write(Path(directory), self.module, self.base)

    @staticmethod
    @own_modes()
    def from_pretrained(
        source: str | Path, model: Any, dtype: torch.dtype | None = None
    ) -> Accelerator:
        """Loads an accelerator from a folder or a hub id for the base ``model`` it was trained on.

        ``dtype``: of its weights; default: the model's. A model of the same shape with other
        weights is accepted and sets ``other_weights``. Raises UserError for a missing or damaged
        file, an unknown method, or a model whose shape differs from the base's, and lists every
        difference.
        """
        directory = _folder(source, model)
        path = directory / DESCRIPTION
        if not path.exists() and (directory / PUBLISHED).exists():
            return _published(directory, model, dtype)
        description = read_description(path, _read(path))
        base = BaseShape.of(model.config)
        try:
            training = find_training(description["method"])
            config = training.config.from_json(description["config"])
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        other_weights = _check_base(directory, description["base"], model)
        module = _empty(training, config, base, path)
        weights = _read(directory / WEIGHTS)
        if hashlib.sha256(weights).hexdigest() != description["weights_sha256"]:
            raise UserError(
                f"{directory / WEIGHTS} is not the file that {DESCRIPTION} describes (its "
                "checksum differs: truncated, damaged or from another save); download or train "
                "it again."
            )
        try:
            tensors = load(weights)
        except (SafetensorError, ValueError, KeyError) as error:
            raise UserError(
                f"{directory / WEIGHTS} is not a readable safetensors file ({error})."
            ) from None
        _check_tensors(directory / WEIGHTS, tensors, module, base)
        _fill(module, tensors, model, dtype)
        return Accelerator(
            description["method"],
            config,
            module,
            description["base"],
            description["training"],
            description["results"],
            other_weights,
            directory,
            description["weights_sha256"],
            read_fingerprints(directory, description),
        )


def check_export(directory: str | Path, overwrite: bool) -> None:
    """Raises UserError for a folder whose files an export would replace: any checkpoint, or, with
    `overwrite`, one that is not in a published layout.
    """
    directory = Path(directory)
    there = [name for name in EXPORTED if (directory / name).exists()]
    if there and not overwrite:
        raise UserError(
            f"{directory} already holds a checkpoint; name another folder, or use --overwrite"
        )
    if there and not any(layout.found(directory) for _, layout in _layouts()):
        raise UserError(
            f"{directory / there[0]} exists and does not belong to an exported accelerator, so "
            "it is not replaced; name another folder"
        )


def _layouts() -> list[tuple[str, Published]]:
    """The methods with a layout of their own elsewhere."""
    found = ((name, find_training(name).published) for name in trainable())
    return [(name, published) for name, published in found if published is not None]


def _published(directory: Path, model: Any, dtype: torch.dtype | None) -> Accelerator:
    """A checkpoint in a layout of others, whose base it does not describe: what fits is taken."""
    base, path = BaseShape.of(model.config), directory / PUBLISHED
    method, layout = next((one for one in _layouts() if one[1].found(directory)), (None, None))
    if method is None or layout is None:
        raise UserError(
            f"{directory} is not an accelerator: it has no {DESCRIPTION}, and {PUBLISHED} has no "
            f"field 'speculators_model_type' of {' or '.join(name for name, _ in _layouts())}"
        )
    config, tensors = layout.read(directory, base, dense(weight_of(model.get_input_embeddings())))
    module = _empty(find_training(method), config, base, path)
    _check_tensors(directory, tensors, module, base)
    _fill(module, tensors, model, dtype)
    return Accelerator(method, config, module, describe_base(model), folder=directory)


def _empty(training: Training, config: MethodConfig, base: BaseShape, path: Path) -> nn.Module:
    """Modules of the shapes that the config means, without any memory for them."""
    try:
        module: nn.Module = training.build(config, base, "meta")
        return module
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _fill(
    module: nn.Module, tensors: dict[str, torch.Tensor], model: Any, dtype: torch.dtype | None
) -> None:
    """Puts the tensors into the module, beside the model."""
    module.load_state_dict({name: t.clone() for name, t in tensors.items()}, assign=True)
    dtype = dtype or next(iter(model.parameters())).dtype
    module.to(device=device_of(model), dtype=dtype).eval().requires_grad_(False)


def _check_tensors(
    path: Path, tensors: dict[str, torch.Tensor], module: nn.Module, base: BaseShape
) -> None:
    """UserError unless ``tensors`` are what ``module`` (on the meta device) holds: names, shapes,
    kinds and ids.
    """
    expected = module.state_dict()
    for name in sorted(expected.keys() | tensors.keys()):
        wanted, found = expected.get(name), tensors.get(name)
        if wanted is None or found is None or wanted.shape != found.shape:
            raise UserError(
                f"{path}: tensor '{name}' has shape {_shape(found, 'missing')}; "
                f"the config needs {_shape(wanted, 'no such tensor')}."
            )
        if found.dtype != wanted.dtype and not (
            wanted.is_floating_point() and found.is_floating_point()
        ):
            raise UserError(
                f"{path}: tensor '{name}' is {found.dtype}; the config needs {wanted.dtype}."
            )
        if found.is_floating_point() and not found.float().isfinite().all():
            raise UserError(
                f"{path}: tensor '{name}' holds values that are not finite; download or train "
                "the accelerator again."
            )
    tokens = tensors.get("draft_tokens")
    if tokens is not None and (
        tokens.min() < 0 or tokens.max() >= base.vocab_size or (tokens.diff() <= 0).any()
    ):
        raise UserError(
            f"{path}: tensor 'draft_tokens' must hold increasing token ids below {base.vocab_size}."
        )


def _shape(tensor: torch.Tensor | None, otherwise: str) -> tuple[int, ...] | str:
    return otherwise if tensor is None else tuple(tensor.shape)


def _folder(source: str | Path, model: Any) -> Path:
    from multirate.loading.hub import resolve_accelerator

    path = Path(source)
    return path if path.is_dir() else resolve_accelerator(source, model.config)


def _read(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():  # a device or a pipe may have no end
            raise OSError(errno.EINVAL, "not a regular file")
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; an accelerator folder holds {DESCRIPTION} "
            f"and {WEIGHTS}."
        ) from None


def _check_base(directory: Path, trained_for: dict[str, Any], model: Any) -> str | None:
    """None, or a sentence when the weights are others than those of the base. UserError for another
    shape.
    """
    here, name = describe_base(model), _base_name(trained_for)
    _check_shape(f"in {directory}", trained_for, here)
    if here["fingerprint"] == trained_for.get("fingerprint"):
        return None
    return (
        f"the accelerator in {directory} was trained for {name}, but this model has other "
        f"weights (fingerprint {here['fingerprint'][:8]} instead of "
        f"{reprlib.repr(trained_for.get('fingerprint'))[1:9]})"
    )


def _check_shape(which: str, trained_for: dict[str, Any], here: dict[str, Any]) -> None:
    """UserError unless the base that the accelerator was trained for has the shape of `here`."""
    wrong = [
        f"{name} {here[name]} instead of {reprlib.repr(trained_for.get(name))}"
        for name in ("architecture", "num_layers", "hidden_size", "vocab_size")
        if here[name] != trained_for.get(name)
    ]
    if wrong:
        raise UserError(
            f"The accelerator {which} was trained for {_base_name(trained_for)} and does not fit "
            f"this model: {'; '.join(wrong)}."
        )


def _base_name(trained_for: dict[str, Any]) -> str:
    name = trained_for.get("name")
    return reprlib.repr(name)[1:-1] if isinstance(name, str) and name else "another model"
