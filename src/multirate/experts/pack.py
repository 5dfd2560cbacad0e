"""A model's files → expert store, one expert in memory at a time; interrupted, the same call goes
on.
"""

from __future__ import annotations

import contextlib
import json
import os
import reprlib
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from multirate.errors import UserError
from multirate.experts.layout import MODULE, NATIVE, ExpertTensors, RecordFormat
from multirate.experts.packed import PackedRecords
from multirate.experts.shards import Shards
from multirate.experts.store import (
    DATA,
    FORMAT,
    INDEX,
    VERIFIED,
    ExpertStore,
    StoreIndex,
    about_record,
)
from multirate.io import held, parse_json, write_atomically
from multirate.loading.explained import explained
from multirate.loading.hub import GGUF
from multirate.runtime.native import library
from multirate.runtime.native.formats import BF16, format_named
from multirate.runtime.native.moe import MOE_FAMILIES, expert_tiles
from multirate.runtime.quantised import CHOICES, ON_LOAD, Weight

_PARTIAL, _PROGRESS = "experts.bin.partial", "packing.json"
_CHECKPOINT_BYTES = 256 << 20  # progress is written at least so often


class Experts(Protocol):
    """The experts of a model's files."""

    layers: list[int]
    num_experts: int

    def parts(self, layer: int, expert: int) -> Sequence[Weight]:
        """One expert's gate, up and down. Raises UserError for values that are not finite."""
        ...


@dataclass(frozen=True)
class _Source:
    """A model's experts, and what the index says of it. write(row, expert, record): fills a
    record.
    """

    experts: Experts
    name: str
    revision: str
    top_k: int
    record: RecordFormat | PackedRecords
    write: Callable[[int, int, Tensor], None]


def pack(
    model: Path,
    out: Path,
    name: str | None = None,
    on_expert: Callable[[int, int], None] | None = None,
    force: bool = False,
    layout: str = "auto",
    weights: str = "file",
) -> StoreIndex:
    """Packs the experts of a model, a folder or a GGUF file, into the folder `out`; returns what
    was packed.

    on_expert(done, all): called for each expert.
    force: replaces a finished store of another revision. One of the same revision is left as it is.
    layout: "module", "native" (as the kernel reads weights, so that nothing is copied while
        generating) or "auto": native for the families and sizes that the kernel runs.
    weights: "file": as they are in the model's files, a GGUF file's blocks included; "bf16": a GGUF
        file's expanded; "q8_0", "q4_0" or "q4_1": those of any other model in such blocks.

    An incomplete file is never named experts.bin. Raises UserError naming file and reason.
    """
    if layout not in ("auto", MODULE, NATIVE):
        raise UserError(f"layout {layout!r} is unknown; accepted: auto, {MODULE} or {NATIVE}")
    if weights not in CHOICES:
        raise UserError(f"weights is {weights!r}; accepted: {', '.join(CHOICES)}")
    with explained(f"model {model}"), contextlib.ExitStack() as stack:
        if model.suffix.lower() == GGUF:
            source = _gguf(model, layout, weights)
        else:
            source = _folder(stack.enter_context(Shards(model)), layout, weights)
        if name is not None:
            source = replace(source, name=name)
        if (out / INDEX).is_file() and not force:
            return _packed_before(out, source, as_they_are=layout == "auto" and weights == "file")
        return _Packer(source, out).run(on_expert)


def _packed_before(out: Path, source: _Source, as_they_are: bool) -> StoreIndex:
    """A finished store of this source, or, if `as_they_are`, of the same weights in the other
    layout. UserError for any other.
    """
    index = ExpertStore.open(out).index
    same = index.revision == source.revision
    if same and (index.record == source.record or (as_they_are and index.layout == MODULE)):
        return index
    other = f"{index.model} in the layout {index.layout}, in {index.record.weights}"
    if not same:
        other = f"{index.model}, another model or another revision"
    raise UserError(
        f"{out} holds the experts of {other}; name another folder or replace it with --force"
    )


def _folder(shards: Shards, layout: str, weights: str) -> _Source:
    """Of a folder with safetensors files."""
    experts, config = ExpertTensors(shards), _config(shards.folder)
    about = shards.folder.name, shards.revision(), _top_k(shards.folder, config)
    record = _packed_record(config, experts, layout, weights)
    if record is not None:
        return _Source(experts, *about, record, _packing(experts, record))

    def write(row: int, expert: int, into: Tensor) -> None:
        experts.format.write(experts.expert(experts.layers[row], expert), into)

    return _Source(experts, *about, experts.format, write)


def _gguf(path: Path, layout: str, weights: str) -> _Source:
    """Of a GGUF file."""
    from multirate.loading.gguf.experts import GgufExperts
    from multirate.loading.gguf.file import GgufFile

    if weights in ON_LOAD:
        raise UserError(
            f"weights is {weights!r}, but {path} has its own quantisation; accepted for a GGUF "
            "file: file (as it is) or bf16 (expanded)"
        )
    if layout == MODULE:
        raise UserError(f"layout {MODULE} is for folders; a GGUF file is packed for the kernel")
    file = GgufFile(path)
    experts = GgufExperts(file, expand=weights == "bf16")
    why = _why_not_tiled(experts.hidden, experts.intermediate)
    if why is not None:
        raise UserError(f"{path} cannot be packed: {why}")
    record = PackedRecords(experts.hidden, experts.intermediate, experts.formats)
    about = path.stem, file.identity(), experts.top_k
    return _Source(experts, *about, record, _packing(experts, record))


def _packing(experts: Experts, record: PackedRecords) -> Callable[[int, int, Tensor], None]:
    work = library.Workspace()

    def write(row: int, expert: int, into: Tensor) -> None:
        record.write(row, experts.parts(experts.layers[row], expert), into, work)

    return write


def _packed_record(
    config: dict[str, Any], experts: ExpertTensors, layout: str, weights: str
) -> PackedRecords | None:
    """The records in layout native; None: in layout module."""
    if layout == MODULE:
        if weights != "file":
            raise UserError(f"layout {MODULE} keeps the weights as they are; leave out {weights}")
        return None
    shapes, families = experts.format.shapes, ", ".join(MOE_FAMILIES)
    hidden, intermediate = shapes["down_proj"]
    why = _why_not_tiled(hidden, intermediate)
    if config.get("model_type") not in MOE_FAMILIES or len(shapes) > 2:
        why = f"the kernel runs experts of {families}, without biases"
    elif weights == "file" and experts.format.dtype != torch.bfloat16:
        why = f"experts in {experts.format.weights} stay as they are only in layout {MODULE}"
    if why is None:
        to = format_named(weights) or BF16
        return PackedRecords(hidden, intermediate, ((to, to, to),) * len(experts.layers))
    if layout == NATIVE or weights != "file":
        asked = f"layout {NATIVE}" if weights == "file" else f"weights {weights}"
        raise UserError(f"the model cannot be packed with {asked}: {why}")
    return None


def _why_not_tiled(hidden: int, intermediate: int) -> str | None:
    """Why the kernel cannot run experts of this size; None: it can."""
    if not expert_tiles(hidden, intermediate):
        return (
            "the kernel needs a hidden size that is a multiple of 64 and an intermediate size that "
            f"is a multiple of 32, not {hidden} and {intermediate}"
        )
    try:
        library.kernel()
    except library.NativeUnavailable as reason:
        return str(reason)
    return None


def _config(model: Path) -> dict[str, Any]:
    try:
        content = (model / "config.json").read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {model / 'config.json'}: {error.strerror}") from None
    found = parse_json(content, model / "config.json")
    if not isinstance(found, dict):
        raise UserError(f"{model / 'config.json'} is {reprlib.repr(found)}; accepted: an object")
    return found


def _top_k(model: Path, config: dict[str, Any]) -> int:
    for key in ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk"):
        if type(config.get(key)) is int and config[key] > 0:
            return int(config[key])
    raise UserError(
        f"{model / 'config.json'} has no num_experts_per_tok (the number of experts per token)"
    )


class _Packer:
    """State of one packing: checksums of the records written so far, and the file they are in."""

    def __init__(self, source: _Source, out: Path) -> None:
        self._source, self._out = source, out
        experts = source.experts
        self._keys = [
            (r, e) for r in range(len(experts.layers)) for e in range(experts.num_experts)
        ]
        self._checksums: list[int] = []
        self._bytes = source.record.bytes

    def run(self, on_expert: Callable[[int, int], None] | None) -> StoreIndex:
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            with held(self._out):
                return self._pack(on_expert)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UserError(f"cannot write {error.filename or self._out}: {reason}") from error

    def _pack(self, on_expert: Callable[[int, int], None] | None) -> StoreIndex:
        out, partial = self._out, self._out / _PARTIAL
        self._resume()
        self._check_space()
        self._save()  # before the partial file, which is no one's without it
        with partial.open("r+b" if partial.exists() else "w+b") as file:
            file.truncate(len(self._checksums) * self._bytes)
            file.seek(0, os.SEEK_END)
            self._write(file, on_expert)
        source = self._source
        index = StoreIndex(
            source.name,
            source.revision,
            tuple(source.experts.layers),
            source.experts.num_experts,
            source.top_k,
            source.record,
            tuple(self._checksums),
        )
        (out / INDEX).unlink(
            missing_ok=True
        )  # never an index beside data that it does not describe
        (out / VERIFIED).unlink(missing_ok=True)
        os.replace(partial, out / DATA)
        write_atomically(out / INDEX, json.dumps(index.to_json()))
        (out / _PROGRESS).unlink(missing_ok=True)
        return index

    def _write(self, file: Any, on_expert: Callable[[int, int], None] | None) -> None:
        record = torch.zeros(self._bytes, dtype=torch.uint8, device="cpu")
        unsaved = 0
        try:
            for row, expert in self._keys[len(self._checksums) :]:
                self._source.write(row, expert, record)
                data = record.numpy()
                file.write(data)
                self._checksums.append(zlib.crc32(data.tobytes()))
                unsaved += self._bytes
                if unsaved >= _CHECKPOINT_BYTES:
                    self._save(file)
                    unsaved = 0
                if on_expert is not None:
                    on_expert(len(self._checksums), len(self._keys))
        finally:
            self._save(file)

    def _save(self, file: Any = None) -> None:
        if file is not None:
            file.flush()
            os.fsync(file.fileno())
        progress = {**self._about(), "checksums": self._checksums}
        write_atomically(self._out / _PROGRESS, json.dumps(progress))

    def _about(self) -> dict[str, Any]:
        return {"revision": self._source.revision, **about_record(self._source.record)}

    def _resume(self) -> None:
        """Takes over the records of an interrupted packing of the same checkpoint. Raises UserError
        for files of these names that packing did not write.
        """
        saved = _object(self._out / _PROGRESS)
        same = self._about()
        if saved is not None and not {*same, "checksums"} <= saved.keys():
            raise _foreign(self._out / _PROGRESS)
        index = _object(self._out / INDEX)
        if index is not None and index.get("format") != FORMAT:
            raise _foreign(self._out / INDEX)
        begun = saved is not None or index is not None
        owned = {_PARTIAL: saved is not None, DATA: begun, VERIFIED: begun}
        for name, ours in owned.items():
            if (self._out / name).exists() and not ours:
                raise _foreign(self._out / name)
        if saved is not None and same.items() <= saved.items() and (self._out / _PARTIAL).exists():
            size = (self._out / _PARTIAL).stat().st_size
            self._checksums = saved["checksums"][: size // self._bytes]

    def _check_space(self) -> None:
        needed = (len(self._keys) - len(self._checksums)) * self._bytes
        free = shutil.disk_usage(self._out).free
        if needed > free:
            raise UserError(
                f"{self._out} has {free / 1000000000.0:.1f} GB free; the experts need "
                f"{needed / 1000000000.0:.1f} GB"
            )


def _object(path: Path) -> dict[str, Any] | None:
    """The content of one of our JSON files; None without the file. Raises UserError for anything
    but an object.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        found = parse_json(content, path)
    except UserError:
        found = None
    if not isinstance(found, dict):
        raise _foreign(path)
    return found


def _foreign(path: Path) -> UserError:
    return UserError(
        f"{path} exists and was not written by multirate pack, so it is not replaced; name "
        "another folder or delete it"
    )
