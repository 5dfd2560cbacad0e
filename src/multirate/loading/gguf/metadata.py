"""The keys of a GGUF file's header, each checked for its type and range before it is used."""

from __future__ import annotations

import math
import reprlib
from typing import Any, NoReturn

from multirate.errors import UserError
from multirate.loading.gguf.file import GgufFile

MAX_SIZE = 1 << 24
"""Of anything that decides a tensor's size: products of these must stay below 2^63."""
MAX_CONTEXT = 1 << 31


class Metadata:
    """The keys that begin with `prefix`; remembers which were asked for."""

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self.file = file
        self._prefix = prefix
        self._read: set[str] = set()

    def get(self, key: str, otherwise: Any = None) -> Any:
        """A value; the same one for every layer where it is given by layer."""
        self._read.add(key)
        value = self.file.metadata.get(self._prefix + key, otherwise)
        if isinstance(value, list):
            if not value:
                self.refuse(key, value, "one value, or the same value for every layer")
            if any(other != value[0] for other in value):
                raise UserError(
                    f"{self.file.path}: {self._prefix}{key} differs between layers; multirate "
                    "does not support models whose layers differ in size"
                )
            value = value[0]
        return value

    def count(self, key: str, otherwise: int | None = None, most: int = MAX_SIZE) -> int:
        """A whole number of at least 1; needed where there is no other."""
        value = self.get(key, otherwise)
        if not _is_whole(value) or not 1 <= value <= most:
            self.refuse(key, value, f"a whole number from 1 to {most}")
        return int(value)

    def real(self, key: str, otherwise: float | None = None) -> float:
        """A finite number above 0; needed where there is no other."""
        value = self.get(key, otherwise)
        is_number = _is_whole(value) or isinstance(value, float)
        if not is_number or not 0 < value < math.inf:
            self.refuse(key, value, "a number above 0")
        return float(value)

    def text(self, key: str, otherwise: str | None = None) -> str:
        value = self.get(key, otherwise)
        if not isinstance(value, str):
            self.refuse(key, value, "text")
        return str(value)

    def flag(self, key: str, otherwise: bool) -> bool:
        value = self.get(key, otherwise)
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return bool(value)

    def token(self, key: str, vocabulary: int) -> int | None:
        """A token's id; None where the file has no such key."""
        value = self.get(key)
        if value is not None and not (_is_whole(value) and 0 <= value < vocabulary):
            self.refuse(key, value, f"a token id, from 0 to {vocabulary - 1}")
        return None if value is None else int(value)

    def array(self, key: str, kind: type, length: int | None = None) -> list[Any] | None:
        """A list of `kind`, of `length` elements; None where the file has no such key."""
        self._read.add(key)
        value = self.file.metadata.get(self._prefix + key)
        if value is None:
            return None
        name = {str: "texts", int: "whole numbers", float: "numbers"}[kind]
        if not isinstance(value, list) or not all(issubclass(t, kind) for t in {*map(type, value)}):
            self.refuse(key, value, f"a list of {name}")
        if length is not None and len(value) != length:
            self.refuse(key, value, f"a list of {length} {name}, not {len(value)}")
        if kind is float and not all(map(math.isfinite, value)):
            self.refuse(key, value, "finite numbers")
        return list(value)

    def unread(self, known: set[str]) -> list[str]:
        """The keys nobody asked for, other than the known ones."""
        keys = (key for key in self.file.metadata if key.startswith(self._prefix))
        names = (key.removeprefix(self._prefix) for key in keys)
        return [name for name in names if name not in self._read | known]

    def refuse(self, key: str, value: Any, accepted: str) -> NoReturn:
        found = "missing" if value is None else reprlib.repr(value)
        raise UserError(
            f"{self.file.path} is damaged or not supported: {self._prefix}{key} is {found}; "
            f"accepted: {accepted}"
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
