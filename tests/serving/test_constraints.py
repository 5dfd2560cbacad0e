"""A grammar's mask is the same whatever was asked before, and grammars that cannot work are
refused.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from multirate.serving.constraints import Constrained, Constraint, Grammars
from multirate.serving.errors import ApiError
from multirate.serving.parts import forced_call
from serving.conftest import END, WORDS, tokens

GRAMMARS = Grammars(WORDS, len(WORDS), (END,))
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "integer"}},
        "b": {"enum": ["x", "xy"]},
    },
    "required": ["a"],
}
CONSTRAINTS = [
    (Constraint("json", SCHEMA, "schema"), '{"a": [1, 23], "b": "xy"}'),
    (Constraint("regex", r"(ab|a)*c{1,3}", "regex"), "abaabcc"),
    (Constraint.choice(["yes", "yesterday", 'n"o', "é\n😀"], "choice"), "yesterday"),
    (Constraint("lark", 'start: "é" start | "z"', "grammar"), "ééz"),
]
PROMPT = tokens("the prompt", end=False)


def mask(processor: Constrained, new: list[int]) -> list[bool]:
    """Which tokens may follow; all for a text that the grammar refuses."""
    scores = processor(torch.tensor([[*PROMPT, *new]]), torch.zeros(1, len(WORDS)))
    return (scores[0] > -torch.inf).tolist()


@pytest.mark.parametrize(("constraint", "text"), CONSTRAINTS, ids=lambda one: str(one)[:12])
def test_the_order_of_questions_does_not_matter(constraint: Constraint, text: str) -> None:
    draw, right = random.Random(0), tokens(text)
    matcher = GRAMMARS.matcher(constraint)
    one = Constrained(matcher.deep_copy(), len(PROMPT))
    for _ in range(150):
        new = right[: draw.randrange(len(right) + 1)]
        if draw.random() < 0.5:  # a draft that may leave the grammar
            new = new + [draw.choice([*right, draw.randrange(len(WORDS))]) for _ in range(3)]
        fresh = Constrained(GRAMMARS.matcher(constraint), len(PROMPT))
        if draw.random() < 0.3:
            assert one.forced([*PROMPT, *new]) == fresh.forced([*PROMPT, *new])
        assert mask(one, new) == mask(fresh, new)


@pytest.mark.parametrize(("constraint", "text"), CONSTRAINTS, ids=lambda one: str(one)[:12])
def test_only_what_the_grammar_admits_may_follow(constraint: Constraint, text: str) -> None:
    processor, right = Constrained(GRAMMARS.matcher(constraint), len(PROMPT)), tokens(text)
    for count, token in enumerate(right):
        may = mask(processor, right[:count])
        assert may[token] and not all(may)
    assert not mask(processor, [])[END]


def test_what_is_forced_is_the_text_that_must_follow() -> None:
    schema = {"type": "object", "properties": {"colour": {"const": "blue"}}, "required": ["colour"]}
    form = Constraint("regex", r'\{"colour": "[a-z]{2}", "n": 1\}', "regex")
    processor = Constrained(GRAMMARS.matcher(form), len(PROMPT))
    begin = tokens('{"colour": "', end=False)
    assert processor.forced(PROMPT) == begin
    assert processor.forced([*PROMPT, *begin]) == []
    rest = tokens('", "n": 1}', end=False)
    new = [*begin, *tokens("ab", end=False)]
    assert processor.forced([*PROMPT, *new])[: len(rest)] == rest
    for token in rest:
        may = mask(processor, new)
        assert may[token]
        new.append(token)
    assert processor.forced([*PROMPT, *tokens("nonsense", end=False)]) == []
    loose = Constrained(GRAMMARS.matcher(Constraint("json", schema, "schema")), len(PROMPT))
    assert loose.forced(PROMPT)  # the brace


def test_nothing_is_forced_within_a_thought() -> None:
    close = tokens("!", end=False)[0]
    processor = Constrained(GRAMMARS.matcher(CONSTRAINTS[3][0]), len(PROMPT), after=close)
    assert processor.forced([*PROMPT, *tokens("hm", end=False)]) == []


def test_a_random_text_within_a_schema_is_json_that_fits_it() -> None:
    draw = random.Random(1)
    for _ in range(5):
        processor, new = Constrained(GRAMMARS.matcher(CONSTRAINTS[0][0]), len(PROMPT)), []
        while END not in new and len(new) < 500:
            new.append(draw.choice([t for t, may in enumerate(mask(processor, new)) if may]))
        if END in new:
            found = json.loads(WORDS.decode(new, skip_special_tokens=True))
            assert all(isinstance(number, int) for number in found["a"])


def test_a_grammar_begins_after_the_thought_that_the_prompt_opens() -> None:
    close = tokens("!", end=False)[0]
    processor = Constrained(GRAMMARS.matcher(CONSTRAINTS[2][0]), len(PROMPT), after=close)
    assert all(mask(processor, tokens("anything", end=False)))
    may = mask(processor, [*tokens("anything", end=False), close])
    assert may[tokens("y")[0]] and not may[tokens("a")[0]]


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("regex", "[", "regex"),
        Constraint("regex", r"[^\s\S]", "regex"),
        Constraint("regex", "(?=a)b", "regex"),
        Constraint("json", {"type": "nonsense"}, "schema"),
        Constraint("json", {"enum": []}, "schema"),
        Constraint("json", {"type": "string", "minLength": 2, "maxLength": 1}, "schema"),
        Constraint("json", "no JSON", "schema"),
        Constraint("lark", "start: missing", "grammar"),
        Constraint("lark", "", "grammar"),
    ],
)
def test_grammars_that_cannot_work_are_refused(constraint: Constraint) -> None:
    with pytest.raises(ApiError, match=f"^{constraint.param} "):
        GRAMMARS.matcher(constraint)


def test_forced_calls_name_a_tool_and_fit_its_schema() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "f", "parameters": schema}},
        {"type": "function", "function": {"name": "g"}},
    ]

    def admits(text: str, several: bool) -> bool:
        matcher = GRAMMARS.matcher(Constraint("lark", forced_call(tools, several), "tools"))
        ids = tokens(text, end=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def call(name: str, arguments: str) -> str:
        body = f'{{"name": "{name}", "arguments": {arguments}}}'
        return f"<tool_call>\n{body}\n</tool_call>"

    assert admits(call("f", '{"x": 1}'), several=False) and admits(call("g", "{}"), several=False)
    two = call("f", '{"x": 1}') + "\n" + call("g", "{}")
    assert admits(two, several=True) and not admits(two, several=False)
    for wrong in (call("h", "{}"), call("f", "{}"), call("f", '{"x": "1"}'), "hello"):
        assert not admits(wrong, several=True)
