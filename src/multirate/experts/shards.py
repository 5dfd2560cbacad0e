"""A model folder's safetensors files, read tensor by tensor: nothing is loaded that is not asked for."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from multirate.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SAMPLES = 64


class Shards:
    """The tensors of a folder by name. Use as a context manager; files are opened once and memory-mapped.

    Raises UserError naming the file that is missing, truncated or no safetensors file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack: dict[str, Any] = {}
        self._file_of = self._find()

    def _find(self) -> dict[str, str]:
        index = self.folder / INDEX
        if index.is_file():
            try:
                named: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{index} is not a safetensors index ({error})") from None
            missing = sorted({name for name in named.values() if not (self.folder / name).is_file()})
            if missing:
                raise UserError(f"{self.folder} lacks {missing[0]}, which {INDEX} names ({len(missing)} files missing)")
            return named
        if not (self.folder / SINGLE).is_file():
            raise UserError(f"{self.folder} has no {SINGLE} and no {INDEX}: only safetensors files can be packed")
        return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)

    def _open(self, name: str) -> Any:
        if name not in self._stack:
            try:
                self._stack[name] = safe_open(self.folder / name, framework="pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise UserError(f"{self.folder / name} cannot be read: {error}") from None
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
            whole: Tensor = part[:] if index is None else part[index : index + 1][0]
        except (SafetensorError, RuntimeError) as error:
            raise UserError(f"{self.folder / self._file_of[name]}: tensor {name} cannot be read: {error}") from None
        return whole

    def _slice(self, name: str) -> Any:
        handle = self._open(self._file_of[name])
        try:
            return handle.get_slice(name)
        except SafetensorError as error:
            raise UserError(f"{self.folder / self._file_of[name]} has no tensor {name}: {error}") from None

    def revision(self) -> str:
        """32 hex digits over every tensor's name, shape and 64 of its values: another revision has another one."""
        digest = hashlib.sha256()
        for name in self.names():
            part = self._slice(name)
            shape = tuple(part.get_shape())
            first = part[: min(1, shape[0])] if shape else part[:]
            last = part[shape[0] - 1 : shape[0]] if shape and shape[0] else first
            digest.update(f"{name} {shape} {part.get_dtype()}\n".encode())
            for piece in (first, last):
                flat = piece.reshape(-1)
                at = torch.linspace(0, max(flat.numel() - 1, 0), min(_SAMPLES, flat.numel()), dtype=torch.float64)
                digest.update(flat[at.long()].contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:32]

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        for handle in self._stack.values():
            handle.__exit__(None, None, None)
        self._stack.clear()
