"""/v1/responses: OpenAI's newer form of a chat. Nothing is stored, so a conversation is sent whole
each time.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from pydantic import ValidationError

from multirate.serving import sse
from multirate.serving.answers import Update
from multirate.serving.bodies import ChatBody, ResponsesBody
from multirate.serving.chat import chat_choices
from multirate.serving.errors import ApiError, of_validation
from multirate.serving.model import ServedModel
from multirate.serving.parts import Call, Said, Thought
from multirate.serving.replies import Reply, timings_of
from multirate.serving.requests import Usage
from multirate.serving.settings import HttpSettings


class ResponseReply(Reply):
    def __init__(self, body: ResponsesBody, model: ServedModel, settings: HttpSettings) -> None:
        """Tokenises. Raises ApiError, or UserError, for what cannot be done."""
        for name in ("previous_response_id", "background"):
            if getattr(body, name):
                raise ApiError(f"{name} is not supported, as nothing is stored", name)
        super().__init__("resp_", model, chat_choices(_as_chat(body), model, settings))
        self._body = body
        self._number = 0
        self._open: dict[str, Any] | None = None
        self._output: list[dict[str, Any]] = []

    def whole(self) -> dict[str, Any]:
        choice = self.choices[0]
        output: list[dict[str, Any]] = []
        if choice.thought:
            output.append(_reasoning(choice.thought))
        if choice.said or not choice.calls:
            output.append(_message(choice.said))
        output += [_function_call(call) for call in choice.calls]
        return self._response(choice.finish, output)

    def opening(self) -> list[bytes]:
        response = self._response(None, [])
        return [
            self._event(f"response.{kind}", response=response)
            for kind in ("created", "in_progress")
        ]

    def events(self, update: Update) -> list[bytes]:
        events: list[bytes] = []
        for part in update.parts:
            if isinstance(part, Call):
                events += self._close() + self._whole_call(part)
                continue
            kind = "message" if isinstance(part, Said) else "reasoning"
            if self._open is None or self._open["type"] != kind:
                events += self._close() + self._begin(kind)
            events.append(self._delta(part))
        if update.finish is not None:
            if self._open is None and not self._output:
                events += self._begin("message")
            events += self._close()
        return events

    def closing(self) -> list[bytes]:
        response = self._response(self.choices[0].finish, self._output)
        return [self._event(f"response.{response['status']}", response=response)]

    def failing(self, error: ApiError) -> list[bytes]:
        said = {"code": error.code or "server_error", "message": error.message}
        response = self._response(None, self._output) | {"status": "failed", "error": said}
        return [self._event("response.failed", response=response)]

    def _event(self, kind: str, **fields: Any) -> bytes:
        numbered = {"type": kind, "sequence_number": self._number} | fields
        self._number += 1
        return sse.named(numbered)

    def _begin(self, kind: str) -> list[bytes]:
        """Opens an item with one part of text."""
        self._open = _message("") if kind == "message" else _reasoning("")
        empty = self._open | {"content": [], "status": "in_progress"}
        place, part = len(self._output), self._open["content"][0]
        where = {"item_id": self._open["id"], "output_index": place, "content_index": 0}
        return [
            self._event("response.output_item.added", output_index=place, item=empty),
            self._event("response.content_part.added", part=dict(part), **where),
        ]

    def _delta(self, part: Said | Thought) -> bytes:
        assert self._open is not None
        content = self._open["content"][0]
        content["text"] += part.text
        more: dict[str, Any] = {"logprobs": []} if isinstance(part, Said) else {}
        return self._event(
            f"{_text_event(self._open)}.delta", delta=part.text, **self._where(), **more
        )

    def _where(self) -> dict[str, Any]:
        assert self._open is not None
        place = len(self._output)
        return {"item_id": self._open["id"], "output_index": place, "content_index": 0}

    def _close(self) -> list[bytes]:
        """Ends the open item, if there is one."""
        if self._open is None:
            return []
        item, where, part = self._open, self._where(), self._open["content"][0]
        more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        events = [
            self._event(f"{_text_event(item)}.done", text=part["text"], **where, **more),
            self._event("response.content_part.done", part=part, **where),
            self._event("response.output_item.done", output_index=len(self._output), item=item),
        ]
        self._output.append(item)
        self._open = None
        return events

    def _whole_call(self, call: Call) -> list[bytes]:
        item, place = _function_call(call), len(self._output)
        where = {"item_id": item["id"], "output_index": place}
        begun = item | {"arguments": "", "status": "in_progress"}
        kind, done = (
            "response.function_call_arguments",
            {"name": call.name, "arguments": call.arguments},
        )
        self._output.append(item)
        return [
            self._event("response.output_item.added", output_index=place, item=begun),
            self._event(f"{kind}.delta", delta=call.arguments, **where),
            self._event(f"{kind}.done", **done, **where),
            self._event("response.output_item.done", output_index=place, item=item),
        ]

    def _response(self, finish: str | None, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, used = self._body, self.total()
        cut = {"reason": "max_output_tokens"} if finish == "length" else None
        status = "in_progress" if finish is None else "incomplete" if cut else "completed"
        ended = finish is not None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model.name,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": body.model_dump(by_alias=True, include={"text"})["text"] or _TEXT,
            "tool_choice": body.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "tools": body.model_dump(include={"tools"})["tools"] or [],
            "top_p": body.top_p,
            "usage": _usage(used) if ended else None,
        } | ({"timings": timings_of(used)} if ended else {})


_TEXT = {"format": {"type": "text"}}


def _text_event(item: dict[str, Any]) -> str:
    kind = "output_text" if item["type"] == "message" else "reasoning_text"
    return f"response.{kind}"


def _message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return _item("msg_", "message") | {"role": "assistant", "content": [part]}


def _reasoning(text: str) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    return _item("rs_", "reasoning") | {"summary": [], "content": [part]}


def _function_call(call: Call) -> dict[str, Any]:
    item = _item("fc_", "function_call")
    named = {"call_id": f"call_{uuid.uuid4().hex[:24]}", "name": call.name}
    return item | named | {"arguments": call.arguments}


def _item(prefix: str, kind: str) -> dict[str, Any]:
    return {"id": f"{prefix}{uuid.uuid4().hex}", "type": kind, "status": "completed"}


def _usage(used: Usage) -> dict[str, Any]:
    """`usage` as the Responses API names it."""
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {"cached_tokens": used.cached_tokens},
        "output_tokens": used.new_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used.prompt_tokens + used.new_tokens,
    }


def _as_chat(body: ResponsesBody) -> ChatBody:
    """The same request as a chat. Raises ApiError for items that a chat does not have."""
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    for place, item in enumerate(items):
        _add_item(item, messages, f"input.{place}")
    same = ("temperature", "top_p", "seed", "parallel_tool_calls", "stream")
    fields: dict[str, Any] = {name: getattr(body, name) for name in same}
    for name in ("prediction", "speculative"):
        value = getattr(body, name)
        fields[name] = None if value is None else value.model_dump()
    fields |= {"messages": messages, "max_completion_tokens": body.max_output_tokens}
    if body.tools:
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ]
    choice = body.tool_choice
    fields["tool_choice"] = (
        choice
        if choice is None or isinstance(choice, str)
        else {"type": "function", "function": {"name": choice.name}}
    )
    form = body.text.format if body.text is not None else None
    if form is not None:
        schema = {"json_schema": {"schema": form.schema_ or {"type": "object"}}}
        fields["response_format"] = {"type": form.type} | (
            schema if form.type == "json_schema" else {}
        )
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        raise of_validation(error) from error


def _add_item(item: dict[str, Any], messages: list[dict[str, Any]], where: str) -> None:
    """Adds an item of `input` to the turns. Thoughts are left out: templates drop earlier ones."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.get("output")
        text = output if isinstance(output, (str, list)) else json.dumps(output)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    elif kind != "reasoning":
        raise ApiError(
            f"{where} is of type {str(kind)[:40]!r}; accepted: message, function_call, "
            "function_call_output, reasoning",
            "input",
        )
