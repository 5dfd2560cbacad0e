"""Decodes tokens to text as they arrive, for every kind of tokenizer.

Tokenizers cannot decode piece by piece: a decoder may drop a text's first space, a character may
take several tokens, and a run of byte tokens (<0x0A>) is valid or invalid only as a whole. The
newest tokens are therefore decoded together with a few before them, and the text of those few is
cut off. DecodeStream of tokenizers does the same, but emits characters of a run that may turn out
invalid, then fails, and drops what it holds back at the end.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

_CONTEXT = 4
"""How many earlier pieces of text the next one is decoded with. One would do, except for decoders
that drop several spaces.
"""
_HALF = "\ufffd"
"""What part of a UTF-8 character decodes to."""
_UNTIDY = re.compile(r" ('|'v|'r|n|n'|' )?$")
"""Ends of a text that the tokenizer's clean-up may join with what follows."""


class TextStream:
    """Decodes tokens and emits only text that later tokens cannot change. In the end it has written
    what the tokenizer's `decode` gives for all tokens together.
    """

    def __init__(
        self, tokenizer: Any, write: Callable[[str], None], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._write = write
        self._skip = skip_special_tokens
        self._tidies = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._bytes = _byte_tokens(tokenizer)
        self._silent = self._left_out()
        self._clear()

    def push(self, tokens: Sequence[int]) -> None:
        """Adds tokens of the same text."""
        for token in tokens:
            if token not in self._silent:
                self._waiting.append(token)
                if token not in self._bytes and len(self._waiting) >= self._worth_decoding:
                    self._hand_on()

    def end(self) -> None:
        """Writes the text that was held back."""
        if self._waiting:
            self._write(self._decode([*self._before, *self._waiting])[len(self._begun) :])
        self._clear()

    def _clear(self) -> None:
        self._pieces = deque[list[int]](maxlen=_CONTEXT)
        self._before: list[int] = []
        self._begun = ""
        self._waiting: list[int] = []
        self._worth_decoding = 1

    def _hand_on(self) -> None:
        together = [*self._before, *self._waiting]
        text = self._decode(together)
        new = text[len(self._begun) :]
        if not new or not text.startswith(self._begun) or self._may_change(text, together):
            # Tried again for each of the next few tokens, but not for each of thousands.
            self._worth_decoding = len(self._waiting) + 1 + len(self._waiting) // 8
            return
        self._write(new)
        self._pieces.append(self._waiting)
        self._waiting, self._worth_decoding = [], 1
        self._before = [token for piece in self._pieces for token in piece]
        self._begun = self._decode(self._before)

    def _may_change(self, text: str, tokens: list[int]) -> bool:
        if text.endswith(_HALF):
            return True
        return self._tidies and bool(_UNTIDY.search(self._decode(tokens, tidy=False)))

    def _decode(self, tokens: list[int], tidy: bool | None = None) -> str:
        options = {} if tidy is None else {"clean_up_tokenization_spaces": tidy}
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip, **options))

    def _left_out(self) -> frozenset[int]:
        """Special tokens that are not part of the text."""
        if not self._skip:
            return frozenset()
        special = getattr(self._tokenizer, "all_special_ids", ())
        return frozenset(token for token in special if not self._decode([token]))


def _byte_tokens(tokenizer: Any) -> frozenset[int]:
    """The tokens that stand for one byte each (<0x0A>), if the vocabulary has them."""
    known = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
    return frozenset(known) - {None, tokenizer.unk_token_id}
