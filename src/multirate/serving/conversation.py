"""Turns of a chat as token ids, by the tokenizer's chat template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

from multirate.errors import UserError
from multirate.loading.chat_template import encode_chat
from multirate.serving.bodies import Message
from multirate.serving.errors import ApiError
from multirate.serving.model import ServedModel
from multirate.serving.parts import CALL, CALLED
from multirate.serving.sampling import text_of

_TOOLS = """\
You may call one or more of these functions to help with the user's query. They are described by \
JSON schemas within <tools></tools>:
<tools>
{tools}
</tools>
For each call, return a JSON object with the function's name and arguments within {call}{called}:
{call}
{{"name": <name>, "arguments": <arguments>}}
{called}"""
"""For chat templates without a place for tools."""


def encode(
    model: ServedModel,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None = None,
    options: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation that the model continues. options: variables for the template.

    Raises ApiError for turns that the template refuses.
    """
    turns = [_turn(message, place) for place, message in enumerate(messages)]
    options = _checked(model.tokenizer, options or {})
    if tools and _shows_tools(model.tokenizer, tools):
        options["tools"] = tools
    elif tools:
        turns = _with_tools(turns, tools)
    try:
        return encode_chat(model.tokenizer, turns, "messages", **options)
    except UserError as error:
        raise ApiError(str(error), "messages") from error


def _turn(message: Message, place: int) -> dict[str, Any]:
    """As chat templates expect it: a text, and calls with their arguments as objects."""
    where = f"messages.{place}"
    turn = message.model_dump(exclude_none=True)
    turn["content"] = text_of(message.content, where)
    if message.role == "developer":
        turn["role"] = "system"
    if message.tool_calls:
        turn["tool_calls"] = [_call(call, where) for call in message.tool_calls]
    return turn


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"{where} has a tool call without function.name", "messages")
    arguments = function.get("arguments") or "{}"
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        raise ApiError(f"{where} has a tool call whose arguments are no JSON", "messages") from None
    return call | {"function": function | {"arguments": arguments}}


def _checked(tokenizer: Any, options: dict[str, Any]) -> dict[str, Any]:
    """A copy. Raises ApiError for names that would change more than the template's variables."""
    reserved = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in options:
        if name in reserved or name in ("messages", "template_kwargs", "tokenizer", "where"):
            raise ApiError(
                f"chat_template_kwargs has {name[:40]!r}; accepted: variables of the template",
                "chat_template_kwargs",
            )
    return dict(options)


def _shows_tools(tokenizer: Any, tools: list[dict[str, Any]]) -> bool:
    """Whether the chat template has a place for tools."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    return "tools" in tokenizer.get_chat_template(tools=tools)


def _with_tools(turns: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _TOOLS.format(tools=lines, call=CALL, called=CALLED)
    if turns[0]["role"] == "system":
        first = turns[0] | {"content": f"{turns[0]['content']}\n\n{text}"}
        return [first, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]
