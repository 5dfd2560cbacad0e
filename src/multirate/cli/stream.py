"""Tokens to text as they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class TextStream:
    """Decodes tokens and hands on only text that later tokens cannot change."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._write = write
        self._tokens: list[int] = []
        self._written = 0

    def push(self, tokens: list[int]) -> None:
        """More tokens of the same text."""
        self._tokens += tokens
        text = self._decode()
        if text.endswith("\ufffd"):  # half of a UTF-8 character
            return
        self._write(text[self._written :])
        self._written = len(text)
        if text.endswith("\n"):  # decoding starts anew, so that long texts do not cost ever more
            self._tokens, self._written = [], 0

    def end(self) -> None:
        """Writes what was held back."""
        self._write(self._decode()[self._written :])
        self._tokens, self._written = [], 0

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
