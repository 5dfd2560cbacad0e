"""The model's chat template: code that comes with the model and may reject its input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from multirate.errors import UserError, first_line


def apply_template(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], where: str, **options: Any
) -> Any:
    """The result of the tokenizer's `apply_chat_template` for the messages.

    Raises UserError, starting with `where`, for messages that the template rejects (a system
    message, an assistant message first, two messages of one role, none at all) and for a template
    with an error.
    """
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except Exception as error:  # whatever the template's code raises
        roles = [message["role"] for message in messages]
        shown = ", ".join(roles if len(roles) <= 6 else [*roles[:6], "…"])
        turns = f"the turns {shown}" if roles else "a conversation without messages"
        raise UserError(
            f"{where}: the model's chat template rejects {turns}: {first_line(error)}"
        ) from error


def encode_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], where: str = "the prompt", **more: Any
) -> list[int]:
    """Token ids of a conversation that ends with the user's message, by the tokenizer's chat
    template.

    more: further options of the tokenizer's `apply_chat_template`, such as tools. Without a
    template they are left out, and the messages become plain text, separated by blank lines, with
    the tokenizer's own special tokens. Raises UserError, starting with `where`, as
    `apply_template` does, and for a template that produces no text.
    """
    if getattr(tokenizer, "chat_template", None):
        options = {"add_generation_prompt": True, "return_dict": True} | more
        ids = apply_template(tokenizer, messages, where, **options)["input_ids"]
        if not len(ids):
            raise UserError(f"{where}: the model's chat template produces no text")
    else:
        ids = tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    return [int(token) for token in ids]
