"""Writes a GGUF file: it appears whole, after it was read back, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, LlamaFileType

from multirate.errors import UserError
from multirate.io import check_writable, replacing
from multirate.loading.gguf.config import architecture_of, read_config
from multirate.loading.gguf.file import SUFFIX, GgufFile
from multirate.loading.gguf.tokenizer import load_tokenizer
from multirate.loading.gguf.writing.keys import architecture_for, check_config, config_keys
from multirate.loading.gguf.writing.tensors import Source, sources_of_file, sources_of_model
from multirate.loading.gguf.writing.vocabulary import check_tokens, more_ends, tokenizer_keys

TYPES = {
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "q4_1": (GGMLQuantizationType.Q4_1, LlamaFileType.MOSTLY_Q4_1),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
}
"""What matrices become → their kind, and the kind of file that this makes."""
_NOT_COPIED = ("general.architecture", "general.alignment", "general.file_type", "split.")
_ABOUT_WEIGHTS = ("general.quantization_version", "general.quantized_by", "quantize.")
"""Beginnings of keys that describe how a file was made, which is not how the new one is made."""
_HEADER = 64 << 20  # bytes to leave for the metadata when looking for space

Progress = Callable[[int, int], None]
Key = tuple[Any, GGUFValueType, GGUFValueType | None]
"""A value, its type, and the type of its elements."""


def check_type(name: str) -> None:
    """UserError for a type that is not in TYPES."""
    if name not in TYPES:
        raise UserError(f"--type is {name!r}; accepted: {', '.join(TYPES)}")


def check_output(out: Path, source: Path | None, force: bool) -> None:
    """UserError for a file that cannot be written, is not to be replaced, or is the source."""
    if out.suffix.lower() != SUFFIX:
        raise UserError(f"{out} is no name for a GGUF file: it must end in {SUFFIX}")
    check_writable(out)
    if out.exists():
        if source is not None and out.samefile(source):
            raise UserError(f"{out} is the file to read; write the result to another one")
        if not force:
            raise UserError(f"{out} exists; choose another file, or replace it with --force")


def write_model(
    model: Any, tokenizer: Any, name: str, out: Path, to: str, progress: Progress
) -> None:
    """Writes a transformers model with its tokenizer. name: what users call it; to: a key of TYPES;
    progress: called with the number of tensors written, and of all.

    Raises UserError for a model or tokenizer that a GGUF file cannot hold, and if there is no
    space; nothing is left then.
    """
    config = model.config
    architecture = architecture_for(config)
    rows = model.get_input_embeddings().weight.shape[0]
    keys = {
        "general.type": "model",
        "general.name": Path(name).name,
        **config_keys(config),
        **tokenizer_keys(tokenizer, rows, name),
        **more_ends(tokenizer, model.generation_config.eos_token_id),
    }

    def check(written: GgufFile) -> None:
        check_config(config, read_config(written), name)
        check_tokens(tokenizer, load_tokenizer(written), name)

    sources = sources_of_model(model, config, TYPES[to][0])
    typed = {key: _typed(value) for key, value in keys.items()}
    _write(out, architecture, typed, sources, to, progress, check)


def requantise(file: GgufFile, out: Path, to: str, progress: Progress) -> None:
    """Writes another GGUF file's model: its keys and tokenizer as they are, its matrices as `to`.
    Arguments and errors as in `write_model`.
    """
    architecture_of(file)  # of others it is not known which tensors are weights of matrices
    skipped = (*_NOT_COPIED, *_ABOUT_WEIGHTS)
    keys: dict[str, Key] = {
        key: (value, *file.kinds[key])
        for key, value in file.metadata.items()
        if not key.startswith(skipped) and value != []
    }
    sources = sources_of_file(file, TYPES[to][0])
    _write(out, file.architecture, keys, sources, to, progress, lambda written: None)


def _typed(value: Any) -> Key:
    if isinstance(value, list):
        return value, GGUFValueType.ARRAY, GGUFValueType.get_type(value[0]) if value else None
    if isinstance(value, int) and not isinstance(value, bool):
        return value, GGUFValueType.UINT32, None
    return value, GGUFValueType.get_type(value), None


def _write(
    out: Path,
    architecture: str,
    keys: dict[str, Key],
    sources: list[Source],
    to: str,
    progress: Progress,
    check: Callable[[GgufFile], None],
) -> None:
    needed = sum(source.bytes for source in sources) + _HEADER
    free = shutil.disk_usage(out.resolve().parent).free
    if free < needed:
        raise UserError(
            f"cannot write {out}: {needed / 1e6:.0f} MB are needed, but {free / 1e6:.0f} MB free"
        )
    with replacing(out) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture)
        for key, value in keys.items():
            if value[0] != []:
                writer.add_key_value(key, *value)
        writer.add_file_type(TYPES[to][1])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _write_tensors(writer, sources, progress)
        try:
            check(GgufFile(temporary))
        except UserError as error:
            raise UserError(str(error).replace(str(temporary), str(out))) from None


def _write_tensors(writer: gguf.GGUFWriter, sources: list[Source], progress: Progress) -> None:
    for source in sources:
        # a shape in elements, so not the uint8 for which the package counts in bytes
        dtype = np.dtype(np.float32)
        writer.add_tensor_info(source.name, source.shape, dtype, source.bytes, source.kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, source in enumerate(sources):
            progress(done, len(sources))
            writer.write_tensor_data(source.written())
        progress(len(sources), len(sources))
    finally:
        writer.close()
