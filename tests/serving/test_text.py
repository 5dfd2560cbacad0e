"""An answer's text does not depend on how its tokens arrive, and ends before a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.stopping import StopSettings
from multirate.serving.answers import Choice
from multirate.serving.parts import Call, Part, Plain, Reader, Said, Tagged, Templated, Thought
from multirate.serving.requests import Emitted, Finished, Request, Usage
from multirate.serving.stop_strings import StopStrings
from serving.conftest import END, WORDS, served, tokens

MODEL = served()
ALPHABET = "ab<é😀 "
TEXTS = st.text(ALPHABET, max_size=30)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=30)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4)


def blocks(ids: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    found, begin, step = [], 0, 0
    while begin < len(ids):
        size = sizes[step % len(sizes)]
        found.append(tuple(ids[begin : begin + size]))
        begin, step = begin + size, step + 1
    return found


def streamed(text: str, sizes: Sequence[int], stops: Sequence[str], reader: Reader) -> Any:
    """The choice after its last event, and the parts as they came."""
    request = Request([5], SamplingSettings(), StopSettings())
    choice, parts = Choice(0, request, MODEL, reader, stops), []
    for block in blocks(tokens(text), sizes):
        update = choice.take(Emitted(block, ("model",) * len(block)))
        parts.append(update.parts)
        if update.finish is not None:  # the decoder went on after a stop string
            return choice, parts
    parts.append(choice.take(Finished("eos", Usage())).parts)
    return choice, parts


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before the stop string that is complete first."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@given(TEXTS, SIZES, STOPS)
def test_pieces_join_to_the_text_before_the_first_stop_string(
    text: str, sizes: list[int], stops: list[str]
) -> None:
    choice, parts = streamed(text, sizes, stops, Plain())
    pieces = "".join(part.text for several in parts for part in several)
    assert pieces == choice.said == cut(text, stops)
    assert choice.finish == "stop"


@given(TEXTS, STOPS)
def test_no_more_is_held_back_than_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    passed, held = "", StopStrings(stops)
    for count, letter in enumerate(text, 1):
        passed += held.push(letter)
        if held.met:
            break
        rest = text[len(passed) : count]
        assert not rest or any(stop.startswith(rest) for stop in stops)


def test_a_stop_string_across_tokens_is_never_shown_in_part() -> None:
    stop, shown = StopStrings(["STOP"]), []
    for piece in ("so S", "TO", "x ST", "OP more"):
        shown.append(stop.push(piece))
    assert shown == ["so ", "", "STOx ", ""] and stop.met and stop.push("later") == ""


MARKED = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "a", "<", "</", "th", " ", "\n"]
        + 2 * ['{"name": "f"}', '{"name": "g", "arguments": {"x": [1]}}']
    ),
    max_size=8,
).map("".join)


def joined(parts: Sequence[Part]) -> list[Part]:
    """Neighbours of a kind, as one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Call) or type(last) is not type(part):
            found.append(part)
        else:
            assert not isinstance(last, Call) and last is not None
            found[-1] = type(part)(last.text + part.text)
    return found


@given(MARKED, SIZES, st.booleans(), st.booleans())
def test_parts_do_not_depend_on_how_the_text_arrives(
    text: str, sizes: list[int], calls: bool, thinking: bool
) -> None:
    _, whole = streamed(text, [1000], (), Tagged(calls, thinking))
    _, pieces = streamed(text, sizes, (), Tagged(calls, thinking))
    assert joined([p for some in pieces for p in some]) == joined(
        [p for some in whole for p in some]
    )


def read(text: str, calls: bool = True, thinking: bool = False) -> list[Part]:
    reader = Tagged(calls, thinking)
    return joined([*reader.push(text), *reader.end()])


F = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("plain", [Said("plain")]),
        ("  spaced ", [Said("  spaced ")]),
        ("<think>why</think>\n\nbecause", [Thought("why"), Said("because")]),
        ("\n<think>why", [Thought("why")]),
        ("<thin", [Said("<thin")]),
        ("see <think>this</think>", [Said("see <think>this</think>")]),
        (F, [Call("f", '{"x": 1}')]),
        ("ok " + F + "\n" + F, [Said("ok "), Call("f", '{"x": 1}'), Call("f", '{"x": 1}')]),
        ("<think>t</think>" + F, [Thought("t"), Call("f", '{"x": 1}')]),
        (F.removesuffix("\n</tool_call>"), [Call("f", '{"x": 1}')]),
        ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', [Call("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', [Call("f", "{}")]),
        ("<tool_call>no JSON</tool_call>", [Said("<tool_call>no JSON</tool_call>")]),
        ("<tool_call>[1]", [Said("<tool_call>[1]")]),
    ],
)
def test_thoughts_and_calls(text: str, parts: list[Part]) -> None:
    assert read(text) == parts


def test_without_tools_a_call_is_text_and_an_open_thought_begins_at_once() -> None:
    assert read(F, calls=False) == [Said(F)]
    assert read("why</think> so", thinking=True) == [Thought("why"), Said("so")]


TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "[[", "close": "]]", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*\(\(",
            "close": "))",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<eos>", "content": "text"},
    },
}


@pytest.mark.parametrize("sizes", [[1], [3], [1000]])
def test_a_response_template_of_the_tokenizer_decides(sizes: list[int]) -> None:
    if not hasattr(WORDS, "get_response_parser"):
        pytest.skip("this transformers has no response templates")
    words = type(WORDS)(tokenizer_object=WORDS.backend_tokenizer, eos_token="<eos>")
    words.response_template = TEMPLATE
    text = '[[why]]so ((  {"name": "f", "arguments": {"x": 1}}))'
    choice, _ = streamed(text, sizes, (), Templated(words, "<|assistant|>", None))
    assert (choice.thought, choice.said.strip()) == ("why", "so")
    assert choice.calls == [Call("f", '{"x": 1}')] and choice.finish == "tool_calls"


def test_an_end_of_text_token_is_no_text() -> None:
    choice, _ = streamed("ab", [1], (), Plain())
    assert choice.said == "ab" and END in tokens("ab")
