"""The expert store: `experts.bin`, one record per (layer, expert), and `experts.json`, its index.

Opening rejects anything that would give wrong tokens: a missing or truncated file, a wrong
checksum, another model's experts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import reprlib
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multirate.errors import UserError
from multirate.experts.layout import (
    ALIGNMENT,
    FIELD_ALIGNMENT,
    FIELDS,
    MODULE,
    NATIVE,
    Field,
    RecordFormat,
)
from multirate.experts.packed import PackedRecords
from multirate.io import parse_json
from multirate.runtime.native import library
from multirate.runtime.native.formats import BF16, QUANTISED
from multirate.runtime.native.moe import expert_tiles

DATA, INDEX, VERIFIED = "experts.bin", "experts.json", "verified.json"
FORMAT, VERSION = "multirate-experts", 2
_CHUNK = 8 << 20
_DTYPES = ("bfloat16", "float16", "float32")
_FORMATS = {one.name: one for one in (BF16, *QUANTISED)}
_MOST_LAYERS, _MOST_EXPERTS = 10_000, 100_000  # far above any model's
_MOST_BYTES, _MOST_WIDTH = 1 << 40, 1 << 24


@dataclass(frozen=True)
class StoreIndex:
    """What a store holds. `layers[i]` is the model layer of the i-th row of records; `checksums`
    are crc32, row by row.

    `revision` names the checkpoint it was made from (shards.py, or a GGUF file's identity).
    `top_k`: experts per token, for the arithmetic.
    """

    model: str
    revision: str
    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    record: RecordFormat | PackedRecords
    checksums: tuple[int, ...]

    @property
    def layout(self) -> str:
        """See layout.py."""
        return NATIVE if isinstance(self.record, PackedRecords) else MODULE

    @property
    def data_bytes(self) -> int:
        """Size of the data file."""
        return len(self.layers) * self.num_experts * self.record.bytes

    def to_json(self) -> dict[str, Any]:
        """JSON with a digest of itself, so that a damaged index is noticed."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "revision": self.revision,
            "layers": list(self.layers),
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            **about_record(self.record),
            "checksums": [f"{value:08x}" for value in self.checksums],
        }
        return {**content, "digest": _digest(content)}

    @staticmethod
    def from_json(content: Any, place: Path) -> StoreIndex:
        """Raises UserError for anything but an intact index of this version."""
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise UserError(
                f"{place} is not the index of an expert store; make one with multirate pack "
                "MODEL --out DIR"
            )
        if content.get("version") != VERSION:
            raise UserError(
                f"{place} has version {_shown(content.get('version'))}; accepted: {VERSION}; "
                "pack it again with --force"
            )
        claimed = content.pop("digest", None)
        if claimed != _digest(content):
            raise UserError(f"{place} is damaged: its digest does not match; pack it again")
        return _Values(content, place).index()


def about_record(record: RecordFormat | PackedRecords) -> dict[str, Any]:
    """What an index says of the records."""
    if isinstance(record, RecordFormat):
        fields = [asdict(one) for one in record.fields]
        about = {"layout": MODULE, "record_bytes": record.bytes, "dtype": record.weights}
        return {**about, "fields": [{**one, "shape": list(one["shape"])} for one in fields]}
    return {
        "layout": NATIVE,
        "record_bytes": record.bytes,
        "hidden": record.hidden,
        "intermediate": record.intermediate,
        "formats": [[one.name for one in formats] for formats in record.formats],
    }


class _Values:
    """The values of an index, each checked before anything is built from it. Raises UserError
    naming the field, its value and what is accepted.
    """

    def __init__(self, content: dict[str, Any], place: Path) -> None:
        self._content, self._place = content, place

    def index(self) -> StoreIndex:
        layers = self._of(
            "layers",
            lambda found: _rising(found, _MOST_LAYERS),
            "the layers of the model that have experts, in increasing order",
        )
        experts = self._number("num_experts", 1, _MOST_EXPERTS)
        top_k = self._number("top_k", 1, experts)
        packed = self._one_of("layout", (MODULE, NATIVE)) == NATIVE
        record = self._packed(len(layers)) if packed else self._record()
        count = len(layers) * experts
        checksums = self._of(
            "checksums",
            lambda found: _list_of(found, _is_checksum, count),
            f"eight hex digits for each of {count} records",
        )
        return StoreIndex(
            self._of("model", _is_text, "a string"),
            self._of("revision", _is_text, "a string"),
            tuple(layers),
            experts,
            top_k,
            record,
            tuple(int(one, 16) for one in checksums),
        )

    def _record(self) -> RecordFormat:
        dtype = getattr(torch, self._one_of("dtype", _DTYPES))
        size = self._number("record_bytes", ALIGNMENT, _MOST_BYTES)
        self._of("record_bytes", lambda _: size % ALIGNMENT == 0, f"a multiple of {ALIGNMENT}")
        found = self._of(
            "fields",
            lambda fields: _are_fields(fields, dtype, size),
            "gate_up_proj and down_proj, with or without biases, one after the other within "
            "record_bytes",
        )
        fields = (Field(one["name"], tuple(one["shape"]), one["offset"]) for one in found)
        return RecordFormat(dtype, tuple(fields), size)

    def _packed(self, layers: int) -> PackedRecords:
        hidden = self._number("hidden", 1, _MOST_WIDTH)
        intermediate = self._number("intermediate", 1, _MOST_WIDTH)
        found = self._of(
            "formats",
            lambda rows: _list_of(rows, _is_formats, layers),
            f"for each of {layers} layers gate, up and down, each of {', '.join(_FORMATS)}",
        )
        formats = tuple((_FORMATS[g], _FORMATS[u], _FORMATS[d]) for g, u, d in found)
        inputs = (hidden, hidden, intermediate)
        pieces_fit = all(
            width % one.piece == 0
            for row in formats
            for one, width in zip(row, inputs, strict=True)
        )
        try:
            tiled = pieces_fit and expert_tiles(hidden, intermediate)
            self._of(
                "intermediate", lambda _: tiled, "a width that the kernel tiles in these formats"
            )
            record = PackedRecords(hidden, intermediate, formats)
            size = record.bytes
            self._of("record_bytes", lambda one: one == size, f"{size} in these formats")
        except library.NativeUnavailable as reason:
            raise UserError(
                f"{self._place.parent} is packed for the native kernel, which cannot be used here "
                f"({reason}); pack it again with --layout module"
            ) from None
        return record

    def _number(self, name: str, least: int, most: int) -> int:
        return int(self._of(name, lambda one: _whole(one, least, most), f"{least} to {most}"))

    def _one_of(self, name: str, accepted: tuple[str, ...]) -> str:
        known = self._of(name, lambda one: one in accepted, ", ".join(accepted))
        return str(known)

    def _of(self, name: str, is_right: Callable[[Any], bool], accepted: str) -> Any:
        value = self._content.get(name)
        if not is_right(value):
            raise UserError(
                f"{self._place}: {name} is {_shown(value)}; accepted: {accepted}; pack it again"
            )
        return value


def _whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_checksum(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{8}", value) is not None


def _list_of(value: Any, is_right: Callable[[Any], bool], count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(map(is_right, value))


def _rising(value: Any, most: int) -> bool:
    """A list of at least one number, each above the one before."""
    if not isinstance(value, list) or not value or len(value) > most:
        return False
    return all(_whole(one, 0, most) for one in value) and sorted({*value}) == value


def _is_formats(value: Any) -> bool:
    return _list_of(value, lambda one: isinstance(one, str) and one in _FORMATS, 3)


def _are_fields(value: Any, dtype: torch.dtype, size: int) -> bool:
    """Whether they lie in a record of `size` bytes one after the other, and what is needed is
    there.
    """
    if not isinstance(value, list) or len(value) > len(FIELDS):
        return False
    dimensions, end = dict[str, int](), 0
    for one in value:
        shape = one.get("shape") if isinstance(one, dict) else None
        if (
            not isinstance(shape, list)
            or not 1 <= len(shape) <= 2
            or not all(_whole(length, 1, _MOST_BYTES) for length in shape)
            or one.get("name") not in FIELDS
            or one["name"] in dimensions
            or not _whole(one.get("offset"), end, size)
            or one["offset"] % FIELD_ALIGNMENT
        ):
            return False
        end = one["offset"] + math.prod(shape) * dtype.itemsize
        dimensions[one["name"]] = len(shape)
    return end <= size and dimensions.get("gate_up_proj") == dimensions.get("down_proj") == 2


def _shown(value: Any) -> str:
    """A value in an error, however long or deep it is."""
    return reprlib.repr(value)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class ExpertStore:
    """An intact store. Key (row, expert): `offset` in the data file of record.bytes bytes."""

    folder: Path
    index: StoreIndex
    checked: bytearray = field(default_factory=bytearray, compare=False, repr=False)
    """By record: whether its checksum has been found right since the store was opened."""

    def __post_init__(self) -> None:
        self.checked.extend(bytes(len(self.index.checksums)))

    @property
    def path(self) -> Path:
        """The data file."""
        return self.folder / DATA

    @staticmethod
    def open(
        folder: str | os.PathLike[str],
        revision: str | None = None,
        on_bytes: Callable[[int, int], None] | None = None,
    ) -> ExpertStore:
        """The intact store in `folder`, made from the checkpoint `revision` (None: not checked).

        Checksums are verified the first time and whenever the data file has changed since (size,
        time or inode); on_bytes(done, all) reports progress. Raises UserError naming the file and
        what is wrong with it.
        """
        folder = Path(folder)
        place = folder / INDEX
        if not place.is_file():
            raise UserError(
                f"{folder} is not an expert store: it has no {INDEX}; make one with multirate "
                "pack MODEL --out DIR"
            )
        try:
            content = parse_json(place.read_bytes(), place)
        except OSError as error:
            raise UserError(f"cannot read {place}: {error.strerror}") from None
        store = ExpertStore(folder, StoreIndex.from_json(content, place))
        if revision is not None and store.index.revision != revision:
            raise UserError(
                f"{folder} holds the experts of {store.index.model}, revision "
                f"{store.index.revision[:12]}, but the model is another one or has another "
                f"revision ({revision[:12]}); pack it again"
            )
        store._check_data(on_bytes)
        return store

    def offset(self, row: int, expert: int) -> int:
        """Where a record begins in the data file."""
        return (row * self.index.num_experts + expert) * self.index.record.bytes

    def intact(self, row: int, expert: int, record: Tensor) -> bool:
        """Whether a record [bytes] uint8 that has just been read is what was packed; looked at once
        for each.
        """
        number = row * self.index.num_experts + expert
        if not self.checked[number]:
            self.checked[number] = zlib.crc32(record.numpy().data) == self.index.checksums[number]
        return bool(self.checked[number])

    def _check_data(self, on_bytes: Callable[[int, int], None] | None) -> None:
        if not self.path.is_file():
            raise UserError(f"{self.folder} has no {DATA}; pack it again")
        state = self.path.stat()
        wanted = self.index.data_bytes
        if state.st_size != wanted:
            raise UserError(
                f"{self.path} has {state.st_size} bytes, not the {wanted} that {INDEX} lists; "
                "pack it again"
            )
        seal = {
            "size": state.st_size,
            "mtime_ns": state.st_mtime_ns,
            "inode": state.st_ino,
            "checksums": _digest({"all": list(self.index.checksums)}),
        }
        remembered = self.folder / VERIFIED
        with contextlib.suppress(OSError, UserError):
            if parse_json(remembered.read_bytes(), remembered) == seal:
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
                        raise UserError(f"{self.path} ends after {done} bytes; pack it again")
                    found = zlib.crc32(piece, found)
                    left -= len(piece)
                    done += len(piece)
                if found != expected:
                    row, expert = divmod(number, self.index.num_experts)
                    raise UserError(
                        f"{self.path}: the checksum of expert {expert} in layer "
                        f"{self.index.layers[row]} is {found:08x}, not {expected:08x} as packed, "
                        "so the file is damaged; pack it again"
                    )
                if on_bytes is not None:
                    on_bytes(done, self.index.data_bytes)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
