"""`return_origins`: who proposed each token of a streamed chat."""

from __future__ import annotations

from typing import Any

import pytest

from serving.conftest import client, saying
from serving.test_chat import CALL, TOOL
from serving.test_completions import events


def streamed(text: str, sizes: tuple[int, ...] = (1,), **body: Any) -> list[Any]:
    """The choices of the chunks."""
    asked = {"stream": True, "return_origins": True} | body
    found = client(saying(text, sizes=sizes)).chat(**asked)
    return [one for chunk in events(found.text) for one in chunk["choices"]]


def origins(choices: list[Any]) -> list[list[str]]:
    return [piece for one in choices for piece in one.get("origins", ())]


def content(choices: list[Any]) -> str:
    return "".join(one["delta"].get("content", "") for one in choices)


def test_each_token_has_its_text_and_its_origin() -> None:
    found = streamed("héllo", sizes=(3, 1))
    # Steps of hé, l, lo<eos>: the last token of a step is the model's, and é has two tokens.
    assert origins(found) == [
        ["h", "draft"],
        ["", "draft"],
        ["é", "model"],
        ["l", "model"],
        ["l", "draft"],
        ["o", "draft"],
    ]
    assert [one.get("origins") for one in found if one["delta"].get("content") == "hé"] == [
        [["h", "draft"], ["", "draft"], ["é", "model"]]
    ]


@pytest.mark.parametrize("sizes", [(1,), (2, 3), (50,)])
@pytest.mark.parametrize("stop", ["lo w", " ", "absent", "hello world!"])
def test_they_join_to_the_text_up_to_a_stop_string(stop: str, sizes: tuple[int, ...]) -> None:
    found = streamed("hello world", sizes, stop=stop)
    assert "".join(text for text, _ in origins(found)) == content(found)
    assert content(found) == "hello world".split(stop)[0]


def test_text_that_a_limit_cuts_within_a_character() -> None:
    found = streamed("aé", sizes=(2,), max_tokens=2)
    assert origins(found) == [["a", "draft"], ["", "model"], ["\ufffd", "model"]]
    assert content(found) == "a\ufffd"


def test_they_have_the_text_before_it_is_divided() -> None:
    text = f"<think>Well</think>\n\nSee. {CALL}"
    found = streamed(text, sizes=(4,), tools=[TOOL])
    assert "".join(text for text, _ in origins(found)) == text
    assert content(found) == "See. "


def test_they_come_only_when_asked_for_and_only_streamed() -> None:
    assert not origins(streamed("hello", return_origins=False))
    refusal = client(saying("hello")).chat(return_origins=True)
    assert refusal.status_code == 400
    assert refusal.json()["error"]["message"] == "return_origins needs stream: true"
