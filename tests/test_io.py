"""Files that appear whole, and JSON from anywhere."""

from __future__ import annotations

import json

import pytest

from multirate.errors import UserError
from multirate.io import parse_json


@pytest.mark.parametrize(
    "text", ['{"a": [1, "\\u00e9", null]}', '"\\ud83d\\ude00"', "1e999", '"é"']
)
def test_json_is_what_json_says(text: str) -> None:
    assert parse_json(text, "x") == parse_json(text.encode(), "x") == json.loads(text)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"a": 1', "x.json: not valid JSON"),
        ('{\n"a": 1\n', "x.json, line 3: not valid JSON"),
        ("[" * 200_000 + "]" * 200_000, "nested too deeply"),
        ("9" * 5000, "too many digits"),
        (b'"\xe9"', "not UTF-8"),
        ('{"text": "a\\ud800"}', "surrogate"),
        ('{"text": "a\\uDFFF"}', "surrogate"),
    ],
)
def test_what_is_not_json_is_refused_in_a_sentence(content: str | bytes, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        parse_json(content, "x.json")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 120
