"""The model's own answers as training data: what it would say, resumable, refused when made from
other questions.
"""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from multirate.errors import Notice, UserError
from multirate.runtime.load import load_decoder
from multirate.training.data import render_prompt
from multirate.training.own_answers import answer_questions, read_questions

WORDS = [
    "what",
    "is",
    "a",
    "the",
    "cat",
    "dog",
    "sun",
    "red",
    "blue",
    ".",
    "?",
    "User",
    "Assistant",
    ":",
]


@pytest.fixture(scope="module")
def setup():
    core = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["<unk>", *WORDS])}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS) + 1,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
    )
    return model.eval(), tokenizer


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"instruction": f"what is a {w} ?", "output": "the sun"} for w in WORDS[4:9]]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_answers_are_the_models_greedy_text(setup, data, tmp_path):
    model, tokenizer = setup
    out = tmp_path / "own.jsonl"
    assert (
        answer_questions(
            load_decoder(model),
            tokenizer,
            read_questions([data]),
            out,
            (),
            max_new_tokens=6,
            batch=2,
        )
        == 5
    )
    for line in out.read_text().splitlines():
        record = json.loads(line)
        ids = tokenizer(
            f"User: {record['instruction']}\n\nAssistant:",
            return_tensors="pt",
            add_special_tokens=False,
        )["input_ids"]
        expected = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[
            0, ids.shape[1] :
        ]
        assert record["output"] == (
            tokenizer.decode(expected, skip_special_tokens=True).strip() or " "
        )


def test_interrupted_work_is_continued_and_foreign_files_are_refused(setup, data, tmp_path):
    model, tokenizer = setup
    decoder, out = load_decoder(model), tmp_path / "own.jsonl"
    answer_questions(decoder, tokenizer, read_questions([data]), out, (), max_new_tokens=4)
    whole = out.read_text()
    lines = whole.splitlines(keepends=True)
    out.write_text("".join(lines[:2]) + lines[2][:7])  # killed in the middle of a line
    assert (
        answer_questions(decoder, tokenizer, read_questions([data]), out, (), max_new_tokens=4) == 5
    )
    assert out.read_text() == whole
    out.write_text(lines[1] + lines[0])
    with pytest.raises(UserError, match="line 1: made from other questions"):
        answer_questions(decoder, tokenizer, read_questions([data]), out, (), max_new_tokens=4)


def test_later_turns_follow_the_models_own_answers(setup, tmp_path):
    model, tokenizer = setup
    decoder = load_decoder(model)
    data, out = tmp_path / "chat.jsonl", tmp_path / "own.jsonl"
    turns = [
        ("user", "what is the cat ?"),
        ("assistant", "a dog"),
        ("user", "is the sun red ?"),
        ("assistant", "is"),
    ]
    rows = [
        {"messages": [{"role": r, "content": c} for r, c in turns]},
        {"instruction": "the dog ?", "output": "red"},
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        answer_questions(decoder, tokenizer, read_questions([data]), out, (), max_new_tokens=5) == 2
    )
    chat, single = (json.loads(line) for line in out.read_text().splitlines())
    assert single["instruction"] == "the dog ?"
    one, other = (m["content"] for m in chat["messages"] if m["role"] == "assistant")
    ids = tokenizer(
        f"User: {turns[0][1]}\n\nAssistant: {one}\n\nUser: {turns[2][1]}\n\nAssistant:",
        return_tensors="pt",
        add_special_tokens=False,
    )["input_ids"]
    expected = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)[
        0, ids.shape[1] :
    ]
    assert other == (tokenizer.decode(expected, skip_special_tokens=True).strip() or " ")
    text = out.read_text()
    assert (
        answer_questions(decoder, tokenizer, read_questions([data]), out, (), max_new_tokens=5) == 2
    )
    assert out.read_text() == text


def test_limit_spreads_over_the_data(setup, data, tmp_path):
    model, tokenizer = setup
    out = tmp_path / "own.jsonl"
    assert (
        answer_questions(load_decoder(model), tokenizer, read_questions([data], 2), out, (), 2) == 2
    )
    asked = [json.loads(line)["instruction"] for line in out.read_text().splitlines()]
    every = [json.loads(line)["instruction"] for line in data.read_text().splitlines()]
    assert asked == [every[0], every[2]]


def test_a_system_turn_is_kept(setup, tmp_path):
    """What is asked under it is another question, and its answer is the model's to both."""
    model, tokenizer = setup
    data, out = tmp_path / "data.jsonl", tmp_path / "own.jsonl"
    system = {"role": "system", "content": "what is the sun ?"}
    turns = [{"role": "user", "content": "what is a cat ?"}, {"role": "assistant", "content": "-"}]
    records = [{"messages": turns}, {"messages": [system, *turns]}]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    for _ in range(2):  # the second call finds all done
        count = answer_questions(
            load_decoder(model), tokenizer, read_questions([data]), out, (), max_new_tokens=4
        )
    plain, told = (json.loads(line) for line in out.read_text().splitlines())
    assert count == 2 and plain["instruction"] == "what is a cat ?"
    assert told["messages"][:2] == [system, turns[0]]
    asked = [("system", system["content"]), ("user", turns[0]["content"])]
    ids = torch.tensor([tokenizer(render_prompt(tokenizer, asked))["input_ids"]])
    with torch.no_grad():
        for _ in range(4):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    said = tokenizer.decode(ids[0, -4:], skip_special_tokens=True).strip()
    assert told["messages"][2]["content"] == said


def test_equal_questions_are_asked_once(setup, tmp_path):
    model, tokenizer = setup
    data, out = tmp_path / "many.jsonl", tmp_path / "own.jsonl"
    asked = ["what is a cat ?", "What  is a cat ?", "the sun ?", "what is a cat ?\n"] * 5
    data.write_text("".join(json.dumps({"instruction": q, "output": "red"}) + "\n" for q in asked))
    assert (
        answer_questions(
            load_decoder(model), tokenizer, read_questions([data]), out, (), max_new_tokens=2
        )
        == 2
    )
    assert [json.loads(line)["instruction"] for line in out.read_text().splitlines()] == asked[:3:2]


def test_questions_without_room_are_counted_with_their_reason(setup, data, tmp_path):
    model, tokenizer = setup
    long = {"messages": [{"role": "user", "content": "the cat " * 20}]}
    chat = {"messages": [{"role": "user", "content": "what is the " * n} for n in (1, 14, 1)]}
    silent = {"text": "the sun is red"}
    with data.open("a") as handle:
        handle.write("".join(json.dumps(row) + "\n" for row in (long, chat, silent)))
    out = tmp_path / "own.jsonl"
    with pytest.warns(Notice) as said:
        questions = read_questions([data])
        count = answer_questions(load_decoder(model), tokenizer, questions, out, (), 30)
    assert count == 6 == len(out.read_text().splitlines())
    sentences = sorted(str(one.message) for one in said)
    assert sentences == [
        "1 conversations were cut before their last question: the rest leaves no room for 30 "
        "tokens in the model's context of 64 tokens",
        "skipping 1 of 8 records without a user turn",
        "skipping questions (1 of 7: it leaves no room for 30 tokens in the model's context of "
        "64 tokens)",
    ]
    with pytest.raises(UserError, match=r"no question can be answered.*no room for 64 tokens"):
        answer_questions(load_decoder(model), tokenizer, questions, tmp_path / "none", (), 64)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("changed", [{"model": "another"}, {"max_new_tokens": 5}])
def test_answers_of_other_models_and_lengths_are_not_gone_on_from(setup, data, tmp_path, changed):
    model, tokenizer = setup
    decoder, out = load_decoder(model), tmp_path / "own.jsonl"
    given = {"max_new_tokens": 4, "model": "one"}
    answer_questions(decoder, tokenizer, read_questions([data], 2), out, (), **given)
    before = out.read_bytes()
    with pytest.raises(UserError, match=f"line 1: made with another {next(iter(changed))}"):
        answer_questions(decoder, tokenizer, read_questions([data]), out, (), **given | changed)
    assert out.read_bytes() == before


def test_the_data_itself_is_no_place_for_answers(setup, data):
    """Its records have the very questions, and are not this command's."""
    model, tokenizer = setup
    before = data.read_bytes()
    with pytest.raises(UserError, match="line 1: not a record of this command"):
        answer_questions(load_decoder(model), tokenizer, read_questions([data]), data, (), 4)
    assert data.read_bytes() == before
