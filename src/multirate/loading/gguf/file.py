"""What a GGUF file says about itself: metadata, and where its tensors lie.

gguf.GGUFReader makes several numpy objects of every token of a vocabulary: 3.6 s and 165 MB for
SmolLM2's header, where this takes 0.06 s and 12 MB, and a damaged length makes it fill the memory.
Here arrays are read whole, and every length is compared with what the file holds before it is used.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import reprlib
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from multirate.errors import UserError
from multirate.runtime.quantised import FileBytes, dequantised

SUFFIX = ".gguf"
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_NUMBERS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_LENGTH = struct.Struct("<Q")  # before each text
_MAX_DIMENSIONS = 4
_MAX_NAME = 63  # bytes of a tensor's name: GGML_MAX_NAME, with the byte that ends it
_SAMPLE_BYTES = 128


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file: `shape` in torch's order, `begin` and `end` in bytes of the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int
    end: int


class GgufFile:
    """An open file. metadata: its keys and values; kinds: each key's type, and that of a list's
    elements (else None); tensors: by name, in the file's order; source: its bytes.

    Raises UserError for a file that is missing, no GGUF file, of another version or byte order,
    one part of several, truncated, or whose header contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.source = FileBytes(path)
            self._bytes = mmap.mmap(self.source.descriptor, 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            raise UserError(f"{path} is empty: it is not a GGUF file") from None
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UserError(f"cannot read {path}: {reason}") from None
        if self._bytes[:4] != _MAGIC:
            raise UserError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise UserError(
                f"{path}: GGUF version {version} or its byte order is not supported; accepted: "
                f"little-endian files of version {' and '.join(map(str, _VERSIONS))}"
            )
        count, keys = self._number("Q"), self._number("Q")
        self.metadata: dict[str, Any] = {}
        self.kinds: dict[str, tuple[GGUFValueType, GGUFValueType | None]] = {}
        for _ in range(keys):
            name = self._string()
            if name in self.metadata:
                self._damaged(f"holds the key {name!r} twice")
            kind, begin = self._kind(self._number("I")), self._at
            self.metadata[name] = self._value(kind)
            element = None
            if kind == GGUFValueType.ARRAY:
                element = GGUFValueType(struct.unpack_from("<I", self._bytes, begin)[0])
            self.kinds[name] = kind, element
        self.tensors = self._tensors(count)
        parts = self.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise UserError(
                f"{path} is one of {reprlib.repr(parts)} parts; join them first with llama.cpp's "
                "`llama-gguf-split --merge`"
            )

    @property
    def architecture(self) -> str:
        """llama.cpp's name for the kind of model, such as "llama"."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            self._damaged("has no general.architecture")
        return str(name)

    def values(self, name: str) -> np.ndarray:
        """A tensor, dequantised to float32. UserError for a quantisation that is not known."""
        tensor = self.tensors[name]
        if not can_dequantise(tensor.kind):
            accepted = ", ".join(kind.name for kind in GGMLQuantizationType if can_dequantise(kind))
            raise UserError(
                f"{self.path}: tensor {name} is quantised as {tensor.kind.name}, which is not "
                f"supported; accepted: {accepted}"
            )
        blocks = self.source.read(tensor.begin, tensor.end)
        rows = blocks.reshape(math.prod(tensor.shape[:-1]), -1)
        return dequantised(rows, tensor.kind).reshape(tensor.shape)

    def content(self, name: str) -> np.ndarray:
        """A tensor's bytes as they are in the file, uint8 [bytes], read-only."""
        tensor = self.tensors[name]
        return self.source.read(tensor.begin, tensor.end)

    def identity(self) -> str:
        """32 hex digits over the header and three samples of every tensor."""
        digest = hashlib.sha256(self._bytes[: self._at])
        for tensor in self.tensors.values():
            last = max(tensor.end - _SAMPLE_BYTES, tensor.begin)
            for at in (tensor.begin, (tensor.begin + tensor.end) // 2, last):
                digest.update(self._bytes[at : min(at + _SAMPLE_BYTES, tensor.end)])
        return digest.hexdigest()[:32]

    def _tensors(self, count: int) -> dict[str, Tensor]:
        table = []
        for _ in range(count):
            name = self._string()
            if len(name.encode()) > _MAX_NAME or not name.isprintable():
                self._damaged(f"names a tensor {reprlib.repr(name)}")
            dimensions = self._number("I")
            if dimensions > _MAX_DIMENSIONS:
                self._damaged(f"gives tensor {name!r} {dimensions} dimensions")
            shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
            table.append((name, shape, self._number("I"), self._number("Q")))
        alignment = self.metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            self._damaged(f"has general.alignment {reprlib.repr(alignment)}")
        start = -(-self._at // alignment) * alignment
        found: dict[str, Tensor] = {}
        for name, shape, number, offset in table:
            if name in found:
                self._damaged(f"holds the tensor {name!r} twice")
            try:
                kind = GGMLQuantizationType(number)
                block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            except (ValueError, KeyError):
                raise UserError(
                    f"{self.path}: this version of the package gguf does not know quantisation "
                    f"number {number} of tensor {name}; upgrade it (`pip install --upgrade "
                    "gguf`), or use another quantisation of the model"
                ) from None
            if not shape or 0 in shape or shape[-1] % block:
                self._damaged(f"gives tensor {name!r} the shape {shape} in blocks of {block}")
            begin = start + offset
            end = begin + math.prod(shape) // block * block_bytes
            if end > len(self._bytes):
                raise UserError(
                    f"{self.path} is truncated or damaged: tensor {name} ends at byte {end}, but "
                    f"the file ends at {len(self._bytes)}; download it again"
                )
            found[name] = Tensor(name, kind, shape, begin, end)
        return found

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._number(_NUMBERS[kind])
        of, count = self._kind(self._number("I")), self._number("Q")
        if of == GGUFValueType.STRING:
            self._need(8 * count)
            return self._strings(count)
        if of == GGUFValueType.ARRAY:
            self._need(12 * count)
            return [self._value(of) for _ in range(count)]
        layout = _NUMBERS[of]
        self._need(struct.calcsize(f"<{layout}") * count)
        whole = struct.unpack_from(f"<{count}{layout}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{layout}") * count
        return list(whole)

    def _kind(self, number: int) -> GGUFValueType:
        try:
            return GGUFValueType(number)
        except ValueError:
            self._damaged(f"holds a value of kind {number}")
            raise

    def _number(self, layout: str) -> Any:
        size = struct.calcsize(f"<{layout}")
        self._need(size)
        (value,) = struct.unpack_from(f"<{layout}", self._bytes, self._at)
        self._at += size
        return value

    def _string(self) -> str:
        length = self._number("Q")
        self._need(length)
        begin, self._at = self._at, self._at + length
        try:
            return self._bytes[begin : self._at].decode()
        except UnicodeDecodeError:
            self._damaged(f"holds a text at byte {begin} that is not UTF-8")
            raise

    def _strings(self, count: int) -> list[str]:
        """As `_string`, for the hundred thousand texts of a vocabulary: in one loop."""
        data, at, size, length_at = self._bytes, self._at, len(self._bytes), _LENGTH.unpack_from
        found = []
        for _ in range(count):
            begin = at + _LENGTH.size
            if begin > size or (end := begin + length_at(data, at)[0]) > size:
                self._at = at
                return [self._string()]  # raises
            found.append(data[begin:end])
            at = end
        try:
            texts = [text.decode() for text in found]
        except UnicodeDecodeError:
            return [self._string() for _ in range(count)]  # raises, and says where
        self._at = at
        return texts

    def _need(self, size: int) -> None:
        if self._at + size > len(self._bytes):
            self._damaged(
                f"ends at byte {len(self._bytes)}, within its header, which needs {self._at + size}"
            )

    def _damaged(self, how: str) -> None:
        raise UserError(f"{self.path} is truncated or damaged: it {how}; download it again")


@cache
def can_dequantise(kind: GGMLQuantizationType) -> bool:
    """Whether the package gguf turns this quantisation into numbers."""
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return True
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (NotImplementedError, KeyError):
        return False
    return True
