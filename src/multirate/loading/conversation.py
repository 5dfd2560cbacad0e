"""A conversation with a model, as messages and as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from multirate.errors import UserError
from multirate.loading.chat_template import apply_template

Message = dict[str, str]
"""With "role" and "content"."""


class OpenConversation:
    """A conversation that goes on: messages, and the tokens read and written for them.

    The next prompt begins with these tokens wherever the chat template writes their text, so that
    an engine, which keeps their keys and values, reads only what is new. An answer is not tokenised
    again because its text may also be written with other tokens.

    Attributes:

    messages: those so far, the system message first.

    Raises UserError for a tokenizer without a chat template, and for a system message that the
    template rejects.
    """

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "the model has no chat template, so it knows no turns; `multirate generate --raw` "
                "continues a text"
            )
        self._tokenizer = tokenizer
        self.messages: list[Message] = []
        self._read: list[tuple[str, list[int]]] = []
        self.set_system(system)

    @property
    def system(self) -> str | None:
        """The text of the system message."""
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    @property
    def turns(self) -> int:
        """The number of answers."""
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def tokens(self) -> int:
        """How many tokens the last prompt and the answer to it have; 0 before the first answer."""
        return len(self._read[0][1]) if self._read else 0

    def set_system(self, text: str | None) -> None:
        """Sets the system message (None: removes it); the other messages stay. UserError if the
        template rejects it.
        """
        others = self.messages[self.system is not None :]
        own = [] if text is None else [_message("system", text)]
        self._text([*own, *(others or [_message("user", "hello")])][: len(own) + 1])
        self.messages = [*own, *others]

    def reset(self) -> None:
        """Forgets all messages but the system message."""
        self.messages = self.messages[: self.system is not None]
        self._read = []

    def prompt(self, user: str) -> list[int]:
        """Token ids of the conversation and the user's next message. `add` then keeps that.
        UserError if the template rejects it.
        """
        return self._prompt(user)[1]

    def add(self, user: str, answer: Sequence[int]) -> None:
        """Keeps the user's message and the tokens of the model's answer to its prompt."""
        text, ids = self._prompt(user)
        written = text + str(self._tokenizer.decode(list(answer)))
        # what the template changes in an answer, such as spaces at its ends, is tokenised again
        self._read = [(written, [*ids, *answer]), (text, ids)]
        said = str(self._tokenizer.decode(list(answer), skip_special_tokens=True))
        self.messages += [_message("user", user), _message("assistant", said)]

    def _prompt(self, user: str) -> tuple[str, list[int]]:
        text = self._text([*self.messages, _message("user", user)])
        for known, ids in self._read:
            more = self._continued(ids, text[len(known) :]) if text.startswith(known) else None
            if more is not None:
                return text, [*ids, *more]
        return text, self._ids(text)

    def _text(self, messages: Sequence[Message]) -> str:
        options = {"tokenize": False, "add_generation_prompt": True}
        text = str(apply_template(self._tokenizer, messages, "the conversation", **options))
        if not text:
            raise UserError("the conversation: the model's chat template produces no text")
        return text

    def _continued(self, ids: list[int], text: str) -> list[int] | None:
        """Token ids of a text that follows these tokens; None if it shares a token with them. It is
        tokenised after the last of them, because some tokenizers begin every text with a space.
        """
        last = str(self._tokenizer.decode(ids[-1:]))
        alone, together = self._ids(last), self._ids(last + text)
        return together[len(alone) :] if together[: len(alone)] == alone else None

    def _ids(self, text: str) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=False, verbose=False)
        return [int(token) for token in encoded["input_ids"]]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
