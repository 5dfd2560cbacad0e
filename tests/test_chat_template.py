"""Chat templates that refuse their turns: one sentence that says where these are from, wherever a
template is applied.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab.bench import tiny_model

from multirate.errors import UserError
from multirate.lab.bench.prompts import build_prompts
from multirate.lab.bench.suites import load_suite
from multirate.lab.bench.tune import tuning_prompts
from multirate.lab.calibration.measure import read_prompts
from multirate.loading.chat_template import apply_template, encode_chat
from multirate.runtime.load import load_decoder
from multirate.training.data import load_samples
from multirate.training.own_answers import answer_questions, read_questions
from multirate.training.sampled_questions import user_turn

REFUSALS = {
    "system": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
    "user": "{% if messages[0].role == 'user' %}{{ raise_exception('no\nusers') }}{% endif %}",
    "alternation": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    ),
    "error": "{% if messages %}",
    "lacks": "{{ messages[0].nothing.there }}",
}


def refusing(kind: str) -> Any:
    """A tokenizer whose chat template refuses what `kind` names."""
    words = tiny_model.tokenizer()
    words.chat_template = REFUSALS[kind] + tiny_model.TEMPLATE
    return words


def turns(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": f"turn {place}"} for place, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("kind", "roles", "words"),
    [
        ("system", ("system", "user"), "the turns system, user: TemplateError: no system$"),
        ("user", ("user",), "the turns user: TemplateError: no$"),
        ("alternation", ("user", "user"), "the turns user, user: .*roles must alternate"),
        ("alternation", ("user", *5 * ("assistant", "user"), "user"), "assistant, …: .*alternate"),
        ("error", ("user",), "TemplateSyntaxError"),
        ("lacks", ("user",), "UndefinedError"),
        ("system", (), "a conversation without messages: "),
    ],
)
def test_what_a_template_refuses_is_a_sentence(
    kind: str, roles: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UserError, match=f"^here: the model's chat template .*{words}") as caught:
        encode_chat(refusing(kind), turns(*roles), "here")
    assert "\n" not in str(caught.value)


def test_a_template_that_is_not_there() -> None:
    words = tiny_model.tokenizer()
    for absent in (None, {"tool_use": tiny_model.TEMPLATE}):
        words.chat_template = absent
        with pytest.raises(UserError, match=r"^here: the model's chat template rejects"):
            apply_template(words, turns("user"), "here", tokenize=False)


def _train(words: Any, data: Path) -> None:
    load_samples([data], words, 100)


def _calibrate(words: Any, data: Path) -> None:
    read_prompts([data], words, None)


def _tune(words: Any, data: Path) -> None:
    tuning_prompts(words, data)


def _answers(words: Any, data: Path) -> None:
    decoder = load_decoder(tiny_model.model())
    out = data.with_name("answers.jsonl")
    answer_questions(decoder, words, read_questions([data]), out, [], max_new_tokens=2)


def _bench(words: Any, data: Path) -> None:
    questions = load_suite("mt_bench", data)
    build_prompts(questions, words, lambda ids: [5], max_positions=None, max_new_tokens=2)


@pytest.mark.parametrize("ask", [_train, _calibrate, _tune, _answers, _bench])
@pytest.mark.parametrize("kind", ["user", "error"])
def test_file_and_line_of_the_turns_are_named(
    ask: Callable[[Any, Path], None], kind: str, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    record = {"messages": turns("user", "assistant"), "turns": ["turn 0"]}
    data.write_text(f"\n{json.dumps(record)}\n")
    where = f"{data}, line 2: the model's chat template rejects the turns user"
    with pytest.raises(UserError, match=re.escape(where)):
        ask(refusing(kind), data)
    assert list(tmp_path.iterdir()) == [data]  # nothing half-written


BLANK = "{{ '' }}"
"""What a template without any text writes."""


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (_tune, "line 2: the model's chat template produces no text"),
        (_bench, "line 2: the model's chat template produces no text"),
        (_calibrate, "has a non-empty prompt"),
        (_answers, "no question can be answered .*it has no tokens"),
        (_train, "none at all.; the model's chat template drops the answers"),
    ],
)
def test_a_template_that_writes_nothing_is_not_the_datas_fault(
    ask: Callable[[Any, Path], None], said: str, tmp_path: Path
) -> None:
    words, data = tiny_model.tokenizer(), tmp_path / "data.jsonl"
    words.chat_template = BLANK
    record = {"messages": turns("user", "assistant"), "turns": ["turn 0"]}
    data.write_text(f"\n{json.dumps(record)}\n")
    with pytest.raises(UserError, match=said):
        ask(words, data)


def test_an_assistants_turn_first(tmp_path: Path) -> None:
    """Nothing stands before the first answer that a template could write."""
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"messages": turns("assistant", "user", "assistant")}))
    with pytest.raises(UserError, match=r"data\.jsonl, line 1: .* without messages"):
        _train(tiny_model.tokenizer(), data)


def test_questions_that_the_model_asks_itself() -> None:
    with pytest.raises(UserError, match=r"^--questions: the model's chat template"):
        user_turn(refusing("user"), [1])
