"""The model's chat template: code of the model's, which may refuse what it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from multirate.errors import UserError, first_line


def apply_template(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], where: str, **options: Any
) -> Any:
    """What the tokenizer's `apply_chat_template` makes of the messages.

    Raises UserError, begun by `where`, for messages that the template refuses (a system turn, an
    assistant's turn first, two turns of one role, none at all) and for a template with an error.
    """
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except Exception as error:  # whatever the template's code raises
        roles = [message["role"] for message in messages]
        shown = ", ".join(roles if len(roles) <= 6 else [*roles[:6], "…"])
        turns = f"messages with the roles {shown}" if roles else "a conversation without messages"
        raise UserError(
            f"{where}: the model's chat template rejects {turns}: {first_line(error)}"
        ) from error


def encode_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], where: str = "the prompt"
) -> list[int]:
    """Token ids of a conversation that ends with the user's turn, by the tokenizer's chat template.

    A tokenizer without a template gets the turns as plain text with its own special tokens,
    separated by blank lines. Raises UserError, begun by `where`, as `apply_template` does, and for
    a template that writes nothing.
    """
    if getattr(tokenizer, "chat_template", None):
        options = {"add_generation_prompt": True, "return_dict": True}
        ids = apply_template(tokenizer, messages, where, **options)["input_ids"]
        if not len(ids):
            raise UserError(f"{where}: the model's chat template produces no text")
    else:
        ids = tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    return [int(token) for token in ids]
