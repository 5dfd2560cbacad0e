"""Divides an answer's text into what it says, what the model thought, and the calls it makes."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from multirate.serving.stop_strings import first_end, held_back

THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Said:
    text: str


@dataclass(frozen=True)
class Thought:
    text: str


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: str
    """JSON."""


Part = Said | Thought | Call


class Reader(ABC):
    """Takes a growing text. The parts do not depend on how it arrives, but for their number."""

    keeps_special = False
    """Whether it needs the text with special tokens."""

    @abstractmethod
    def push(self, text: str) -> list[Part]:
        """Adds text; returns the parts that are certain now."""

    @abstractmethod
    def end(self) -> list[Part]:
        """The rest, as nothing follows."""


class Plain(Reader):
    """Everything is said."""

    def push(self, text: str) -> list[Part]:
        return [Said(text)] if text else []

    def end(self) -> list[Part]:
        return []


class Tagged(Reader):
    """Reads <think>…</think> at the beginning, and <tool_call>{"name", "arguments"}</tool_call>."""

    def __init__(self, calls: bool, thinking: bool = False, special: bool = False) -> None:
        """calls: whether there are tools. thinking: whether the prompt ends within a thought.
        special: whether some of the tags are special tokens.
        """
        self.keeps_special = special
        self._calls = calls
        self._mode = "think" if thinking else "begin"
        self._waiting = ""

    def push(self, text: str) -> list[Part]:
        self._waiting += text
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return parts

    def end(self) -> list[Part]:
        rest, mode = self._waiting, self._mode
        self._waiting = ""
        if mode == "call":
            return [_call(rest) or Said(CALL + rest)]
        if not rest or (mode == "after" and not rest.strip()):
            return []
        return [Thought(rest) if mode == "think" else Said(rest)]

    def _advance(self, parts: list[Part]) -> bool:
        """Takes one step. Returns whether another may follow."""
        if self._mode in ("begin", "after"):
            return self._skip_space()
        if self._mode == "call":
            return self._read_call(parts)
        closing = THOUGHT if self._mode == "think" else CALL
        kind = Thought if self._mode == "think" else Said
        markers = [closing] if self._mode == "think" or self._calls else []
        found = first_end(self._waiting, markers)
        if found is None:
            cut = len(self._waiting) - held_back(self._waiting, markers)
            following = self._mode
        else:
            cut = found[0]
            following = "after" if self._mode == "think" else "call"
        text, self._waiting = self._waiting[:cut], self._waiting[cut:]
        if text:
            parts.append(kind(text))
        if found is not None:
            self._waiting, self._mode = self._waiting[len(closing) :], following
        return found is not None

    def _skip_space(self) -> bool:
        """Before the first words: only here a thought may begin. Space after a thought or a call
        separates it from what follows, and is left out.
        """
        bare = self._waiting.lstrip()
        if self._mode == "after":
            self._waiting = bare
            self._mode = "say" if bare else "after"
            return bool(bare)
        if bare.startswith(THINK):
            self._waiting, self._mode = bare[len(THINK) :], "think"
            return True
        if THINK.startswith(bare):  # also while there is nothing but space
            return False
        self._mode = "say"
        return True

    def _read_call(self, parts: list[Part]) -> bool:
        inside, closing, after = self._waiting.partition(CALLED)
        if not closing:
            return False
        parts.append(_call(inside) or Said(CALL + inside + CALLED))
        self._waiting, self._mode = after, "after"
        return True


class Templated(Reader):
    """Reads by the tokenizer's own response template, with the parser of transformers."""

    keeps_special = True

    def __init__(self, tokenizer: Any, prompt: str, tools: list[dict[str, Any]] | None) -> None:
        self._parser = tokenizer.get_response_parser(prefix=prompt, tools=tools)

    def push(self, text: str) -> list[Part]:
        return self._parts(self._parser.feed(text))

    def end(self) -> list[Part]:
        try:
            events = self._parser.finalize()[1]
        except ValueError:  # an unfinished call
            return []
        return self._parts(events)

    def _parts(self, events: list[dict[str, Any]]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            kind, field = event["type"], event["field"]
            if field == "tool_calls" and kind == "region_close":
                function = event["value"]["function"]
                parts.append(Call(function["name"], _as_json(function["arguments"])))
            elif kind == "region_chunk" and not event.get("dirty") and field != "tool_calls":
                said = field == "content"
                parts.append(Said(event["text"]) if said else Thought(event["text"]))
        return parts


def reader_for(
    tokenizer: Any, prompt: list[int], tools: list[dict[str, Any]] | None, forced: bool
) -> Reader:
    """The reader for an answer to a chat. forced: the answer is a call in the form of
    `forced_call`.
    """
    has_template = getattr(tokenizer, "response_template", None) is not None
    if has_template and hasattr(tokenizer, "get_response_parser") and not forced:
        return Templated(tokenizer, tokenizer.decode(prompt), tools)
    special = not {THINK, THOUGHT, CALL, CALLED}.isdisjoint(tokenizer.all_special_tokens)
    return Tagged(bool(tools), begins_thinking(tokenizer, prompt), special)


def begins_thinking(tokenizer: Any, prompt: list[int]) -> bool:
    """Whether a prompt ends by opening a thought, as some chat templates make it."""
    return str(tokenizer.decode(prompt[-8:])).rstrip().endswith(THINK)


def forced_call(tools: list[dict[str, Any]], several: bool) -> str:
    """The grammar (llguidance's Lark) of calls of these tools: one, or several."""
    lines = [f"start: call{' (' + json.dumps(chr(10)) + ' call)*' if several else ''}"]
    opened, closed = json.dumps(CALL + "\n"), json.dumps("\n" + CALLED)
    names = [f"call_{place}" for place in range(len(tools))]
    lines.append(f"call: {opened} ({' | '.join(names)}) {closed}")
    for name, tool in zip(names, tools, strict=True):
        function = tool["function"]
        schema = {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": function.get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        lines.append(f"{name}: %json {json.dumps(schema)}")
    return "\n".join(lines)


def _call(text: str) -> Call | None:
    """The call that the text between the tags is, or None."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    return Call(found["name"], _as_json(arguments))


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
