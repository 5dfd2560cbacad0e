"""A model folder's safetensors files, read tensor by tensor: nothing is loaded that is not asked
for.
"""

from __future__ import annotations

import hashlib
import os
import reprlib
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from multirate.errors import UserError
from multirate.io import parse_json
from multirate.torch_modes import plain_tensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SAMPLE_BYTES = 128


class Shards:
    """The tensors of a folder by name. Use as a context manager; files are opened once and
    memory-mapped.

    Raises UserError naming the file that is missing, truncated or no safetensors file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack: dict[str, Any] = {}
        self._file_of = self._find()

    def _find(self) -> dict[str, str]:
        index = self.folder / INDEX
        if index.is_file():
            found = parse_json(index.read_bytes(), index)
            named = found.get("weight_map") if isinstance(found, dict) else None
            if not isinstance(named, dict) or not all(isinstance(v, str) for v in named.values()):
                raise UserError(
                    f"{index} is not a safetensors index: its weight_map is {reprlib.repr(named)}"
                )
            missing = sorted(
                {name for name in named.values() if not (self.folder / name).is_file()}
            )
            if missing:
                raise UserError(
                    f"{self.folder} lacks {missing[0]}, which {INDEX} lists ({len(missing)} "
                    "files are missing)"
                )
            return named
        if not (self.folder / SINGLE).is_file():
            raise UserError(
                f"{self.folder} has no {SINGLE} and no {INDEX}; only safetensors files can be "
                "packed"
            )
        return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)

    def _open(self, name: str) -> Any:
        if name not in self._stack:
            try:
                self._stack[name] = safe_open(self.folder / name, framework="pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise UserError(f"cannot read {self.folder / name}: {error}") from None
        return self._stack[name]

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return tuple(self._slice(name).get_shape())

    def tensor(self, name: str, index: int | None = None) -> Tensor:
        """A tensor, or entry `index` of its first dimension."""
        part = self._slice(name)
        try:
            with plain_tensors():
                whole: Tensor = part[:] if index is None else part[index : index + 1][0]
        except (SafetensorError, RuntimeError) as error:
            raise UserError(
                f"{self.folder / self._file_of[name]}: cannot read tensor {name}: {error}"
            ) from None
        return whole

    def _slice(self, name: str) -> Any:
        handle = self._open(self._file_of[name])
        try:
            return handle.get_slice(name)
        except SafetensorError as error:
            raise UserError(
                f"{self.folder / self._file_of[name]} has no tensor {name}: {error}"
            ) from None

    def revision(self) -> str:
        """32 hex digits over every tensor's name, shape and 384 of its bytes: another revision has
        another one.

        Read, not mapped: the pages around thousands of samples would count as this process's
        memory.
        """
        digest = hashlib.sha256()
        for file in sorted(set(self._file_of.values())):
            self._open(file)  # checks the file
            with (self.folder / file).open("rb", buffering=0) as data:
                length = int.from_bytes(data.read(8), "little")
                header: dict[str, Any] = parse_json(data.read(length), self.folder / file)
                for name in sorted(header.keys() - {"__metadata__"}):
                    about = header[name]
                    begin, end = about["data_offsets"]
                    digest.update(f"{name} {about['shape']} {about['dtype']}\n".encode())
                    for at in (begin, (begin + end) // 2, max(end - _SAMPLE_BYTES, begin)):
                        digest.update(
                            os.pread(data.fileno(), min(_SAMPLE_BYTES, end - at), 8 + length + at)
                        )
        return digest.hexdigest()[:32]

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._stack.values():
            handle.__exit__(None, None, None)
        self._stack.clear()
