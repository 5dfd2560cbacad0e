"""/v1/chat/completions: a conversation's next turn."""

from __future__ import annotations

import uuid
from typing import Any

from multirate.serving import sse
from multirate.serving.answers import Choice, Update
from multirate.serving.bodies import ChatBody, NamedTool
from multirate.serving.constraints import Constraint
from multirate.serving.conversation import encode
from multirate.serving.errors import ApiError
from multirate.serving.model import ServedModel
from multirate.serving.parts import Call, Said, Thought, forced_call, reader_for
from multirate.serving.replies import Reply, chat_logprobs, timings_of, usage_of
from multirate.serving.requests import Request
from multirate.serving.sampling import (
    Choosing,
    constraint_of,
    drafting,
    most_tokens,
    predicted,
    stop_strings,
    stopping,
)
from multirate.serving.settings import HttpSettings


def chat_choices(body: ChatBody, model: ServedModel, settings: HttpSettings) -> list[Choice]:
    """Tokenises. Raises ApiError, or UserError, for what cannot be done."""
    tools = _offered(body)
    constraint, forced = constraint_of(body), _forced(body, tools)
    if forced is not None and constraint is not None:
        raise ApiError(f"{constraint.param} and tool_choice exclude each other", "tool_choice")
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    most = most_tokens(getattr(body, name), name, settings)
    stop = stopping(model, stop_strings(body, settings), most, bool(body.ignore_eos))
    logprobs = _logprobs(body, settings)
    how = drafting(body.speculative, model)
    if body.return_origins and not body.stream:
        raise ApiError("return_origins needs stream: true", "return_origins")
    prompt = encode(model, body.messages, tools, body.chat_template_kwargs)
    model.check_length(prompt, "messages")
    choosing = Choosing(body, model, forced or constraint)
    expected = predicted(body.prediction, model)
    choices = []
    for number in range(body.n or 1):
        request = Request(
            prompt=prompt,
            sampling=choosing.settings(prompt),
            stop=stop,
            number=number,
            prediction=expected,
            logprobs=logprobs,
            **how,
        )
        reader = reader_for(model.tokenizer, prompt, tools, forced is not None)
        origins = bool(body.return_origins)
        choices.append(Choice(number, request, model, reader, stop.stop_strings, origins))
    return choices


class ChatReply(Reply):
    def __init__(self, body: ChatBody, model: ServedModel, settings: HttpSettings) -> None:
        """Tokenises. Raises ApiError, or UserError, for what cannot be done."""
        super().__init__("chatcmpl-", model, chat_choices(body, model, settings))
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._calls: dict[int, int] = {}

    def whole(self) -> dict[str, Any]:
        choices = []
        for choice in self.choices:
            message: dict[str, Any] = {"role": "assistant", "content": choice.said, "refusal": None}
            if choice.thought:
                message["reasoning_content"] = choice.thought
            if choice.calls:
                message["content"] = choice.said or None
                message["tool_calls"] = [_call(call) for call in choice.calls]
            found = {"index": choice.index, "message": message, "logprobs": None}
            if choice.request.logprobs is not None:
                found["logprobs"] = chat_logprobs(self.model, choice.tokens, choice.logprobs)
            choices.append(found | {"finish_reason": choice.finish})
        used = self.total()
        more = {"choices": choices, "usage": usage_of(used), "timings": timings_of(used)}
        return self.head("chat.completion") | more

    def opening(self) -> list[bytes]:
        first = {"role": "assistant", "content": ""}
        return [sse.data(self._chunk(choice.index, first)) for choice in self.choices]

    def events(self, update: Update) -> list[bytes]:
        index = update.choice.index
        deltas = [self._delta(index, part) for part in update.parts]
        chunks = [self._chunk(index, delta) for delta in _joined(deltas)]
        if update.logprobs:
            chunks = chunks or [self._chunk(index, {})]
            found = chat_logprobs(self.model, update.tokens, update.logprobs)
            chunks[0]["choices"][0]["logprobs"] = found
        if update.origins:
            chunks = chunks or [self._chunk(index, {})]
            chunks[0]["choices"][0]["origins"] = update.origins
        if update.finish is not None:
            chunks.append(self._chunk(index, {}, update.finish))
            if update.choice.usage is not None:
                chunks[-1]["timings"] = timings_of(update.choice.usage)
        return [sse.data(chunk) for chunk in chunks]

    def closing(self) -> list[bytes]:
        last = self.head("chat.completion.chunk") | {"choices": []}
        usage = [sse.data(last | {"usage": usage_of(self.total())})]
        return [*(usage if self._usage else []), sse.DONE]

    def _delta(self, index: int, part: Said | Thought | Call) -> dict[str, Any]:
        if isinstance(part, Said):
            return {"content": part.text}
        if isinstance(part, Thought):
            return {"reasoning_content": part.text}
        place = self._calls.get(index, 0)
        self._calls[index] = place + 1
        return {"tool_calls": [{"index": place} | _call(part)]}

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        usage = {"usage": None} if self._usage else {}
        return self.head("chat.completion.chunk") | {"choices": [choice]} | usage


def _joined(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours of one kind, as one."""
    found: list[dict[str, Any]] = []
    for delta in deltas:
        key = next(iter(delta))
        if found and key in found[-1]:
            found[-1][key] += delta[key]
        else:
            found.append(delta)
    return found


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _offered(body: ChatBody) -> list[dict[str, Any]] | None:
    """The tools that the model may call, as chat templates expect them."""
    if not body.tools or body.tool_choice == "none":
        return None
    return [tool.model_dump(exclude_none=True) for tool in body.tools]


def _forced(body: ChatBody, tools: list[dict[str, Any]] | None) -> Constraint | None:
    """The grammar of the calls that the model has to make, if it has to. Raises ApiError for a tool
    that does not exist.
    """
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    if not tools:
        raise ApiError("tool_choice needs tools", "tool_choice")
    if isinstance(choice, NamedTool):
        names = [tool["function"]["name"] for tool in tools]
        wanted = choice.function.name
        tools = [tool for tool in tools if tool["function"]["name"] == wanted]
        if not tools:
            raise ApiError(
                f"tool_choice names {wanted[:100]!r}; accepted: {', '.join(names)}", "tool_choice"
            )
    several = body.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    return Constraint("lark", forced_call(tools, several), "tools")


def _logprobs(body: ChatBody, settings: HttpSettings) -> int | None:
    """How many alternatives are reported with each token; None: no log-probabilities."""
    top = body.top_logprobs
    if top is not None and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs: true", "top_logprobs")
    if top is not None and top > settings.max_logprobs:
        raise ApiError(
            f"top_logprobs is {top}; accepted: 0 to {settings.max_logprobs}", "top_logprobs"
        )
    return (top or 0) if body.logprobs else None
