"""Safetensors → expert store, one expert in memory at a time; interrupted, the same call goes
on.
"""

from __future__ import annotations

import json
import os
import reprlib
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from multirate.errors import UserError
from multirate.experts.layout import MODULE, NATIVE, ExpertTensors
from multirate.experts.shards import Shards
from multirate.experts.store import DATA, FORMAT, INDEX, VERIFIED, ExpertStore, StoreIndex
from multirate.hub import explained
from multirate.io import held, parse_json, write_atomically
from multirate.model.finite import first_not_finite
from multirate.model.native.moe import MOE_FAMILIES, expert_tiles, pack_expert

_PARTIAL, _PROGRESS = "experts.bin.partial", "packing.json"
_CHECKPOINT_BYTES = 256 << 20  # progress is written at least so often


def pack(
    model: Path,
    out: Path,
    name: str | None = None,
    on_expert: Callable[[int, int], None] | None = None,
    force: bool = False,
    layout: str = "auto",
) -> StoreIndex:
    """Packs the experts of the checkpoint in folder `model` into the folder `out`; returns what was
    packed.

    on_expert(done, all): called for each expert.
    force: replaces a finished store of another revision. One of the same revision is left as it is.
    layout: "module", "native" (as the kernel reads weights, so that nothing is copied while
        generating) or "auto": native for the families and sizes that the kernel runs.

    An incomplete file is never named experts.bin. Raises UserError naming file and reason.
    """
    with explained(f"model {model}"), Shards(model) as shards:
        experts = ExpertTensors(shards)
        revision = shards.revision()
        config = _config(model)
        chosen = _layout(layout, config, experts)
        if (out / INDEX).is_file() and not force:
            store = ExpertStore.open(out)
            if store.index.revision == revision and layout in ("auto", store.index.layout):
                return store.index
            other = f"{store.index.model}, another model or another revision"
            if store.index.revision == revision:
                other = f"{store.index.model} in the layout {store.index.layout}"
            raise UserError(
                f"{out} holds the experts of {other}; name another folder or replace it with "
                "--force"
            )
        return _Packer(
            experts, out, revision, name or model.name, _top_k(model, config), chosen
        ).run(on_expert)


def _config(model: Path) -> dict[str, Any]:
    try:
        content = (model / "config.json").read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {model / 'config.json'}: {error.strerror}") from None
    found = parse_json(content, model / "config.json")
    if not isinstance(found, dict):
        raise UserError(f"{model / 'config.json'} is {reprlib.repr(found)}; accepted: an object")
    return found


def _layout(wanted: str, config: dict[str, Any], experts: ExpertTensors) -> str:
    shapes = {field.name: field.shape for field in experts.format.fields}
    possible = (
        config.get("model_type") in MOE_FAMILIES
        and shapes.keys() == {"gate_up_proj", "down_proj"}
        and experts.format.dtype == torch.bfloat16
        and expert_tiles(*shapes["down_proj"])
    )
    if wanted not in ("auto", MODULE, NATIVE):
        raise UserError(f"layout {wanted!r} is unknown; accepted: auto, {MODULE} or {NATIVE}")
    if wanted == NATIVE and not possible:
        raise UserError(
            f"layout native accepts bfloat16 experts of {', '.join(MOE_FAMILIES)}, with a hidden "
            "size that is a multiple of 64 and an intermediate size that is a multiple of 32"
        )
    return NATIVE if possible and wanted != MODULE else MODULE


def _top_k(model: Path, config: dict[str, Any]) -> int:
    for key in ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk"):
        if type(config.get(key)) is int and config[key] > 0:
            return int(config[key])
    raise UserError(
        f"{model / 'config.json'} has no num_experts_per_tok (the number of experts per token)"
    )


class _Packer:
    """State of one packing: checksums of the records written so far, and the file they are in."""

    def __init__(
        self, experts: ExpertTensors, out: Path, revision: str, name: str, top_k: int, layout: str
    ) -> None:
        self._experts, self._out, self._revision, self._name, self._top_k = (
            experts,
            out,
            revision,
            name,
            top_k,
        )
        self._keys = [
            (layer, expert) for layer in experts.layers for expert in range(experts.num_experts)
        ]
        self._layout = layout
        self._checksums: list[int] = []
        self._bytes = experts.format.bytes

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
        index = StoreIndex(
            self._name,
            self._revision,
            tuple(self._experts.layers),
            self._experts.num_experts,
            self._top_k,
            self._experts.format,
            tuple(self._checksums),
            self._layout,
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
            for layer, expert in self._keys[len(self._checksums) :]:
                values = self._experts.expert(layer, expert)
                self._check_values(values, layer, expert)
                if self._layout == NATIVE:
                    values = pack_expert(values["gate_up_proj"], values["down_proj"])
                self._experts.format.write(values, record)
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

    def _check_values(self, values: dict[str, torch.Tensor], layer: int, expert: int) -> None:
        for field in self._experts.format.fields:
            value = values.get(field.name)
            if (
                value is None
                or tuple(value.shape) != field.shape
                or value.dtype != self._experts.format.dtype
            ):
                found = "nothing" if value is None else f"{value.dtype} {tuple(value.shape)}"
                raise UserError(
                    f"expert {expert} of layer {layer}: {field.name} is {found}; the first "
                    f"expert's is {self._experts.format.dtype} {field.shape}"
                )
        wrong = first_not_finite(values.items())
        if wrong is not None:
            raise UserError(
                f"expert {expert} of layer {layer}: {wrong} holds values that are not finite, so "
                "the model's files are damaged; download them again"
            )

    def _save(self, file: Any = None) -> None:
        if file is not None:
            file.flush()
            os.fsync(file.fileno())
        progress = {
            "revision": self._revision,
            "record_bytes": self._bytes,
            "layout": self._layout,
            "checksums": self._checksums,
        }
        write_atomically(self._out / _PROGRESS, json.dumps(progress))

    def _resume(self) -> None:
        """Takes over the records of an interrupted packing of the same checkpoint. Raises UserError
        for files of these names that packing did not write.
        """
        saved = _object(self._out / _PROGRESS)
        same = {"revision": self._revision, "record_bytes": self._bytes, "layout": self._layout}
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
