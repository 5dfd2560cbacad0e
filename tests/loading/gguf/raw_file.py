"""GGUF files written record by record, so that any value can stand at any place."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFValueType as Kind

from multirate.loading.gguf.file import GgufFile

_ALIGNMENT = 32


@dataclass
class Record:
    """Of a tensor; offset: from the first tensor's begin."""

    name: str
    shape: list[int]
    kind: int
    offset: int


@dataclass(repr=False)
class RawFile:
    metadata: list[tuple[str, Any]]
    tensors: list[Record]
    data: bytes

    @staticmethod
    def read(path: Path) -> RawFile:
        file = GgufFile(path)
        first = min(tensor.begin for tensor in file.tensors.values())
        records = [
            Record(tensor.name, list(tensor.shape), int(tensor.kind), tensor.begin - first)
            for tensor in file.tensors.values()
        ]
        return RawFile(list(file.metadata.items()), records, path.read_bytes()[first:])

    def write(self, path: Path) -> Path:
        header = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.metadata))
        for key, value in self.metadata:
            kind, data = _encoded(value)
            header += _text(key.encode()) + struct.pack("<I", kind) + data
        for tensor in self.tensors:
            header += _text(tensor.name.encode()) + struct.pack("<I", len(tensor.shape))
            header += b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape))
            header += struct.pack("<IQ", tensor.kind, tensor.offset)
        path.write_bytes(header + bytes(-len(header) % _ALIGNMENT) + self.data)
        return path


def _text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def _encoded(value: Any) -> tuple[int, bytes]:
    """A value's kind and bytes. bytes: text that need not be UTF-8."""
    if isinstance(value, (str, bytes)):
        return Kind.STRING, _text(value.encode() if isinstance(value, str) else value)
    if isinstance(value, bool):
        return Kind.BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        wide = value if value < 1 << 63 else value - (1 << 64)
        return Kind.INT64 if value < 1 << 63 else Kind.UINT64, struct.pack("<q", wide)
    if isinstance(value, float):
        return Kind.FLOAT64, struct.pack("<d", value)
    parts = [_encoded(each) for each in value]
    of = parts[0][0] if parts else Kind.UINT32
    return Kind.ARRAY, struct.pack("<IQ", of, len(parts)) + b"".join(part for _, part in parts)
