"""Questions that the model asks itself: deterministic, resumable, different from each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from multirate.cli.main import app
from multirate.errors import Notice, UserError
from multirate.runtime.load import load_decoder
from multirate.training import sampled_questions
from multirate.training.question_filter import QuestionFilter
from multirate.training.sampled_questions import QuestionSettings, sample_questions, user_turn

from .tiny import tokenizer as tiny_tokenizer

END = 3


@pytest.fixture(scope="module")
def setup(model_dir: Path):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    return load_decoder(model.eval()), AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(autouse=True)
def short_questions(monkeypatch: pytest.MonkeyPatch):
    """The tiny model's questions are four letters without a space."""
    monkeypatch.setattr("multirate.training.question_filter.FEWEST_LETTERS", 2)
    monkeypatch.setattr("multirate.training.question_filter.LEAST_DISTINCT", 0)
    monkeypatch.setattr("multirate.training.question_filter.ALIKE", 1.0)


def ask(setup, path: Path, count: int = 12, **more):
    decoder, tokenizer = setup
    more.setdefault("settings", QuestionSettings(longest=24))
    return sample_questions(decoder, tokenizer, count, path, (END,), "tiny", **more)


def test_questions_are_a_users_turns(setup, tmp_path):
    found = ask(setup, tmp_path / "q.jsonl")
    assert len(found.questions) == 12 == len(set(found.questions))
    assert found.samples == 12 + sum(found.left_out.values())
    assert not any("<|" in text for text in found.questions)


def test_batches_and_kills_change_nothing(setup, tmp_path):
    whole = tmp_path / "whole.jsonl"
    ask(setup, whole, batch=5)
    lines = whole.read_text().splitlines(keepends=True)
    for kept, rest in ((0, ""), (1, ""), (4, lines[4][:9])):
        part = tmp_path / f"part{kept}.jsonl"
        part.write_text("".join(lines[:kept]) + rest)
        ask(setup, part, batch=3)
        assert part.read_text() == whole.read_text()
    grown = ask(setup, whole, count=15)
    assert whole.read_text().startswith("".join(lines)) and len(grown.questions) == 15
    other = ask(setup, tmp_path / "other.jsonl", settings=QuestionSettings(seed=1, longest=24))
    assert other.questions != grown.questions[:12]


def test_files_of_others_are_refused(setup, tmp_path):
    path = tmp_path / "q.jsonl"
    ask(setup, path, count=2)
    with pytest.raises(UserError, match="another model or with other settings"):
        ask(setup, path, settings=QuestionSettings(seed=2, longest=24))
    path.write_text(json.dumps({"instruction": "hi"}) + "\n")
    with pytest.raises(UserError, match="line 1: not a question"):
        ask(setup, path)


def test_a_seed_is_refused_before_anything_is_written(tmp_path):
    path = tmp_path / "own.jsonl"
    words = ["answers", "tiny", "--questions", "2", "--out", str(path), "--seed", str(2**64)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and "seed is 18446744073709551616" in result.stderr
    assert not list(tmp_path.iterdir())


def test_questions_of_the_data_are_not_asked_again(setup, tmp_path):
    first = ask(setup, tmp_path / "a.jsonl").questions
    rest = ask(setup, tmp_path / "b.jsonl", asked=first[:6]).questions
    assert rest[:6] == first[6:] and not set(rest) & set(first[:6])


def test_a_model_that_repeats_itself_ends_with_a_notice(setup, tmp_path, monkeypatch):
    monkeypatch.setattr(sampled_questions, "ROUND", 16)
    settings = QuestionSettings(temperatures=(0.0,), longest=24)
    with pytest.warns(Notice, match="1 of 12 questions after 32 samples"):
        found = ask(setup, tmp_path / "q.jsonl", settings=settings)
    assert len(found.questions) == 1 and found.left_out["asked already"] == 31


def test_where_a_users_text_is():
    chat = tiny_tokenizer()
    turn = user_turn(chat, (END,))
    assert chat.decode(turn.prefix) == "<|user|>" and turn.ends == (END,) and turn.text_end is None
    chat.chat_template = "{% for m in messages %}User: {{ m['content'] }} [/INST]{% endfor %}"
    assert user_turn(chat, ()).text_end == "[/INST]"
    chat.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(UserError, match="nothing before a user's text"):
        user_turn(chat, (END,))
    with pytest.raises(UserError, match=r"no chat template.*--data"):
        user_turn(tiny_tokenizer(template=False), (END,))


def test_a_text_that_ends_a_turn_is_cut_off(setup, tmp_path):
    decoder, tokenizer = setup
    chat = tiny_tokenizer()
    chat.chat_template = "{% for m in messages %}<|user|>{{ m['content'] }}a{% endfor %}"
    found = sample_questions(
        decoder, chat, 3, tmp_path / "q.jsonl", (END,), "tiny", QuestionSettings(longest=24)
    )
    assert found.questions and not any("a" in text for text in found.questions)
    assert tokenizer.chat_template != chat.chat_template


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Hi?", "too short"),
        ("1 + 2 = 3, 44 / 5 = 8.8; 12 345 678 true, really?", "few letters"),
        ("the cat and the cat and the cat and the cat and the cat and", "goes round"),
        ("long " * 500, "too long"),
        ("how do I  BAKE bread at home without an oven?", "asked already"),
        ("How do I bake bread at home without an oven today?", "close to an earlier question"),
        ("How do I bake a cake that rises?", "with a common beginning"),
        ("What does a heat pump do in winter?", None),
    ],
)
def test_what_is_left_out(text, reason, monkeypatch):
    monkeypatch.undo()  # the real thresholds
    accepts = QuestionFilter(same_opening=1)
    assert accepts.keep("How do I bake bread at home without an oven?")
    assert accepts.keep(text) is (reason is None)
    assert list(accepts.left_out) == ([] if reason is None else [reason])
