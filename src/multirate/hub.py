"""Models and accelerators by local folder, hub id, or from the package; what is missing is said in
a sentence.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import constants, get_session, is_offline_mode, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from multirate.errors import UserError, say_once

if TYPE_CHECKING:
    from multirate.experts.model import OffloadedExperts

DTYPES = {
    "auto": "auto",
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
ACCELERATOR_FILES = ("accelerator.json", "accelerator.safetensors")
_REFERENCE = Path(__file__).parent / "reference"
MIXTURE = "reference-mixture"
EMBEDDED = {"reference": _REFERENCE / "model", MIXTURE: _REFERENCE / "mixture"}
"""Models of the package, by the name that stands for a folder wherever a model is named."""
HUB_SECONDS = 5.0  # that the hub may take to answer at all


@dataclass
class LoadedModel:
    """A causal LM in evaluation mode with its tokenizer; `name` is what the user called it."""

    model: Any
    tokenizer: Any
    name: str
    experts: OffloadedExperts | None = None


def is_reference(name: str | None) -> bool:
    """Whether this names the embedded reference model, which has embedded accelerators."""
    return name is None or (name == "reference" and not Path(name).exists())


def _source(name: str | None) -> str:
    """The folder of an embedded model (None: the reference model), any other name as it is."""
    name = name or "reference"
    if name not in EMBEDDED or Path(name).exists():
        return name
    folder = EMBEDDED[name]
    if not (folder / "config.json").is_file():
        raise UserError(
            f"this installation carries no {name} ({folder}): name a model's folder or hub id"
        )
    return str(folder)


def reference_accelerators() -> dict[str, Path]:
    """The embedded accelerators of the reference model, by preset name."""
    folder = _REFERENCE / "accelerators"
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return {path.name: path for path in found if (path / ACCELERATOR_FILES[0]).is_file()}


def load_model(name: str | None = None, dtype: str = "auto", device: str = "auto") -> LoadedModel:
    """A model and tokenizer by local folder, hub id or name of an embedded one; None is the
    embedded reference model.

    `dtype` is a key of DTYPES ("auto": as saved); `device` is "auto" (a GPU if there is one),
    "cpu", "cuda", "cuda:1" … Raises UserError for an unknown, gated, unreachable, corrupt or
    unsupported model.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown: accepted are {', '.join(DTYPES)}")
    source = _source(name)
    place = find_device(device)
    _check_name(source, "model", "config.json")
    with explained(f"model {source}"):
        files = _at_hand(source)
        model: Any = AutoModelForCausalLM.from_pretrained(files, dtype=DTYPES[dtype])
        model = model.to(place).eval()
    with explained(f"tokenizer of {source}"):
        tokenizer = AutoTokenizer.from_pretrained(files)
    return LoadedModel(model, tokenizer, name or "reference")


def model_folder(name: str) -> Path:
    """The local folder of a model's files: of an embedded one, a folder, or a hub id (its
    safetensors and JSON are downloaded).
    """
    name = _source(name)
    _check_name(name, "model", "config.json")
    if Path(name).is_dir():
        return Path(name)
    with explained(f"model {name}"):
        wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
        return Path(
            snapshot_download(name, allow_patterns=wanted, local_files_only=not _hub_answers())
        )


def load_config(name: str | None = None) -> Any:
    """Only the configuration of a model (see load_model for names and errors)."""
    source = _source(name)
    _check_name(source, "model", "config.json")
    with explained(f"model {source}"):
        return AutoConfig.from_pretrained(_at_hand(source))


def resolve_accelerator(name: str | os.PathLike[str]) -> Path:
    """The local folder of an accelerator: a folder, the name of an embedded one, or a hub id (which
    is downloaded).
    """
    text = os.fspath(name)
    if not Path(text).exists() and text in reference_accelerators():
        return reference_accelerators()[text]
    _check_name(text, "accelerator", ACCELERATOR_FILES[0])
    if Path(text).is_dir():
        return Path(text)
    with explained(f"accelerator {text}"):
        wanted = ["*.json", "*.safetensors"]
        folder = Path(
            snapshot_download(text, allow_patterns=wanted, local_files_only=not _hub_answers())
        )
    if not (folder / ACCELERATOR_FILES[0]).is_file():
        raise UserError(f"{text} is not an accelerator: it has no {ACCELERATOR_FILES[0]}")
    return folder


def _at_hand(name: str) -> str:
    """A folder or hub id that can be loaded; where the hub cannot be reached, the folder of what
    was downloaded.
    """
    if Path(name).is_dir() or _hub_answers():
        return name
    return str(snapshot_download(name, local_files_only=True))


@functools.cache
def _hub_answers() -> bool:
    """Asked once per process, with one request: the hub's client would repeat each of its own for
    half a minute.
    """
    if is_offline_mode():
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except (
        Exception
    ):  # the client's own kinds differ between its versions: no connection, no such host, too slow
        return False
    return True


def find_device(name: str) -> torch.device:
    if name == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        say_once(
            "running on CUDA, whose speed has not been measured: compare with --device cpu, or run "
            "benchmarks/gpu_campaign.py"
        )
        return torch.device("cuda")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UserError(
            f"device {name!r} cannot be used here: accepted are auto, cpu, or cuda with a GPU"
        ) from None
    return device


def _check_name(name: str, kind: str, needed: str) -> None:
    """A path that is no folder, or a folder without the file `needed`, is said before the hub is
    asked for it.
    """
    path, one = Path(name), f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
    if path.is_dir():
        if not (path / needed).is_file():
            raise UserError(f"{name} is not {one}: it has no {needed}")
    elif path.exists():
        raise UserError(f"{name} is a file: {one} is a folder or a hub id such as owner/name")
    elif (
        not name
        or path.is_absolute()
        or name.startswith((".", "~"))
        or name.count("/") > 1
        or os.sep == "\\" in name
    ):
        raise UserError(
            f"there is no folder {name!r}: {one} is a local folder or a hub id such as owner/name"
        )


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns what loading may raise into one sentence. Defects of our own are let
    through.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise UserError(_sentence(what, error)) from error


def _sentence(what: str, error: BaseException) -> str:
    causes = list(_chain(error))

    def any_is(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    if any_is(GatedRepoError):
        return (
            f"{what} is gated: ask for access on its page at huggingface.co, then log in with `hf "
            "auth login`"
        )
    if any_is(RepositoryNotFoundError):
        return (
            f"{what} was not found: check the name, or log in with `hf auth login` if it is private"
        )
    if any_is(HFValidationError):
        return f"{what} was not found: neither a local folder nor a valid hub id such as owner/name"
    if any_is(LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError):
        return _unreachable(what)
    if isinstance(error, OSError) and error.errno is not None:
        place = f" ({error.filename})" if error.filename else ""
        return f"{what} cannot be loaded: {(error.strerror or str(error)).lower()}{place}"
    first = next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
    return f"{what} cannot be loaded: {first[:300].rstrip('.')}"


def _unreachable(what: str) -> str:
    if is_offline_mode():
        why = "the hub cannot be reached, as HF_HUB_OFFLINE is set"
    else:
        why = f"the hub cannot be reached ({constants.ENDPOINT})"
    return (
        f"{what} is not on this machine and {why}: accepted are a local folder, an embedded name "
        f"({', '.join([*EMBEDDED, *reference_accelerators()])}), or with a connection a hub id"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
