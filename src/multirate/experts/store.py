"""The expert store: `experts.bin`, a record per (layer, expert), and `experts.json`, what is in it.

Opening refuses what would give wrong tokens: a missing or truncated file, a wrong checksum, another model's experts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from multirate.errors import UserError
from multirate.experts.layout import MODULE, Field, RecordFormat

DATA, INDEX, VERIFIED = "experts.bin", "experts.json", "verified.json"
FORMAT, VERSION = "multirate-experts", 1
_CHUNK = 8 << 20


@dataclass(frozen=True)
class StoreIndex:
    """What a store holds. `layers[i]` is the model layer of the i-th row of records; `checksums` are crc32, row by row.

    `revision` names the checkpoint it was made from (shards.py). `top_k`: experts per token, for the arithmetic.
    `layout`: see layout.py.
    """

    model: str
    revision: str
    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    record: RecordFormat
    checksums: tuple[int, ...]
    layout: str = MODULE

    @property
    def data_bytes(self) -> int:
        """Size of the data file."""
        return len(self.layers) * self.num_experts * self.record.bytes

    def to_json(self) -> dict[str, Any]:
        """JSON with a digest of itself, so that a damaged index is noticed."""
        content = {
            "format": FORMAT, "version": VERSION, "model": self.model, "revision": self.revision,
            "layout": self.layout, "layers": list(self.layers), "num_experts": self.num_experts, "top_k": self.top_k,
            "dtype": str(self.record.dtype).removeprefix("torch."), "record_bytes": self.record.bytes,
            "fields": [asdict(field) for field in self.record.fields],
            "checksums": [f"{value:08x}" for value in self.checksums],
        }  # fmt: skip
        return {**content, "digest": _digest(content)}

    @staticmethod
    def from_json(content: Any, place: Path) -> StoreIndex:
        """Raises UserError for anything but an intact index of this version."""
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise UserError(f"{place} is not the index of an expert store (multirate pack MODEL --out DIR makes one)")
        if content.get("version") != VERSION:
            raise UserError(f"{place} has version {content.get('version')!r}; accepted is {VERSION}: pack it again")
        claimed = content.pop("digest", None)
        if claimed != _digest(content):
            raise UserError(f"{place} is damaged: its digest does not match; pack it again")
        fields = tuple(Field(f["name"], tuple(f["shape"]), f["offset"]) for f in content["fields"])
        return StoreIndex(
            content["model"], content["revision"], tuple(content["layers"]), content["num_experts"], content["top_k"],
            RecordFormat(getattr(torch, content["dtype"]), fields, content["record_bytes"]),
            tuple(int(value, 16) for value in content["checksums"]), content["layout"],
        )  # fmt: skip


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class ExpertStore:
    """An intact store. Key (row, expert): `offset` in the data file of record.bytes bytes."""

    folder: Path
    index: StoreIndex

    @property
    def path(self) -> Path:
        """The data file."""
        return self.folder / DATA

    @staticmethod
    def open(
        folder: str | os.PathLike[str], revision: str | None = None, on_bytes: Callable[[int, int], None] | None = None
    ) -> ExpertStore:
        """The store in `folder`, whole and unchanged, made from the checkpoint `revision` (None: not checked).

        Checksums are verified the first time and whenever the data file has changed since (size, time or inode);
        on_bytes(done, all) tells how far that is. Raises UserError naming the file and what is wrong with it.
        """
        folder = Path(folder)
        place = folder / INDEX
        if not place.is_file():
            raise UserError(f"{folder} is not an expert store: it has no {INDEX} (multirate pack MODEL --out DIR)")
        try:
            content = json.loads(place.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{place} cannot be read: {error}") from None
        store = ExpertStore(folder, StoreIndex.from_json(content, place))
        if revision is not None and store.index.revision != revision:
            raise UserError(
                f"{folder} was packed from another revision of {store.index.model} ({store.index.revision[:12]}, the "
                f"model given is {revision[:12]}): pack it again"
            )
        store._check_data(on_bytes)
        return store

    def offset(self, row: int, expert: int) -> int:
        """Where a record begins in the data file."""
        return (row * self.index.num_experts + expert) * self.index.record.bytes

    def checksum(self, row: int, expert: int) -> int:
        """crc32 of a record."""
        return self.index.checksums[row * self.index.num_experts + expert]

    def _check_data(self, on_bytes: Callable[[int, int], None] | None) -> None:
        if not self.path.is_file():
            raise UserError(f"{self.folder} has no {DATA}: pack it again")
        state = self.path.stat()
        wanted = self.index.data_bytes
        if state.st_size != wanted:
            raise UserError(f"{self.path} has {state.st_size} bytes, not the {wanted} of {INDEX}: pack it again")
        seal = {"size": state.st_size, "mtime_ns": state.st_mtime_ns, "inode": state.st_ino,
                "checksums": _digest({"all": list(self.index.checksums)})}  # fmt: skip
        remembered = self.folder / VERIFIED
        with contextlib.suppress(OSError, ValueError):
            if json.loads(remembered.read_text()) == seal:
                return
        self._verify(on_bytes)
        with contextlib.suppress(OSError):  # a read-only store is verified each time
            remembered.write_text(json.dumps(seal))

    def _verify(self, on_bytes: Callable[[int, int], None] | None) -> None:
        size, done = self.index.record.bytes, 0
        with self.path.open("rb", buffering=0) as file:
            for number, expected in enumerate(self.index.checksums):
                found, left = 0, size
                while left:
                    piece = file.read(min(left, _CHUNK))
                    if not piece:
                        raise UserError(f"{self.path} ends after {done} bytes: pack it again")
                    found = zlib.crc32(piece, found)
                    left -= len(piece)
                    done += len(piece)
                if found != expected:
                    row, expert = divmod(number, self.index.num_experts)
                    raise UserError(
                        f"{self.path}: the checksum of expert {expert} in layer {self.index.layers[row]} is "
                        f"{found:08x}, {expected:08x} was packed: the file is damaged, pack it again"
                    )
                if on_bytes is not None:
                    on_bytes(done, self.index.data_bytes)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
