"""Training data: every accepted form, response masks, batches, and sentences for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multirate.errors import Notice, UserError
from multirate.training import data as data_module
from multirate.training.data import (
    BatchPlan,
    Conversation,
    Sample,
    collate,
    encode,
    load_samples,
    read_conversations,
    set_aside,
)

from .tiny import tokenizer


def encoded(conversation: Conversation, tokenizer: Any, max_length: int) -> Sample:
    """One conversation by itself."""
    return next(iter(encode([conversation], tokenizer, max_length)))


def responses(sample: Sample, tok: object) -> str:
    return tok.decode(sample.ids[sample.response])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "record,user,answer",
    [
        ({"instruction": "ab", "input": "cd", "output": "ef"}, "ab\ncd", "ef"),
        ({"instruction": "ab", "input": "", "response": "ef"}, "ab", "ef"),
        ({"prompt": "ab", "completion": "ef"}, "ab", "ef"),
        ({"question": "ab", "answer": "ef", "id": 7}, "ab", "ef"),
        (
            {
                "messages": [
                    {"role": "user", "content": "ab"},
                    {"role": "assistant", "content": "ef"},
                ]
            },
            "ab",
            "ef",
        ),
    ],
)
@pytest.mark.parametrize("array", [False, True])
def test_forms(
    tmp_path: Path, record: dict[str, object], user: str, answer: str, array: bool
) -> None:
    path = tmp_path / ("d.json" if array else "d.jsonl")
    path.write_text(json.dumps([record]) if array else json.dumps(record) + "\n\n")
    assert read_conversations(path) == [Conversation((("user", user), ("assistant", answer)))]
    tok = tokenizer()
    sample = encoded(read_conversations(path)[0], tok, 100)
    assert tok.decode(sample.ids) == f"<|user|>{user}<|end|>\n<|assistant|>{answer}<|end|>"
    assert responses(sample, tok) == f"{answer}<|end|>"


def test_several_turns_and_plain_format_and_text() -> None:
    turns = (("user", "ab"), ("assistant", "cd"), ("user", "ef"), ("assistant", "gh"))
    tok = tokenizer()
    assert responses(encoded(Conversation(turns), tok, 100), tok) == "cd<|end|>gh<|end|>"
    plain = tokenizer(template=False)
    sample = encoded(Conversation(turns[:2]), plain, 100)
    assert plain.decode(sample.ids) == "User: ab\n\nAssistant: cd<|end|>"
    assert responses(sample, plain) == " cd<|end|>"
    text = encoded(Conversation(text="abc"), tok, 100)
    assert text.response.all() and tok.decode(text.ids) == "abc<|end|>"
    assert len(encoded(Conversation(turns), tok, 7).ids) == 7


@pytest.mark.parametrize(
    "content,words",
    [
        ("", ["is empty"]),
        ('{"text": "a"}\n{"text": "b"\n', ["line 2", "not valid JSON"]),
        ('{"text": "a"}\n[1]\n', ["line 2", "list"]),
        ('{"txt": "a"}\n', ["line 1", "txt", "accepted"]),
        ('{"prompt": 3, "completion": "x"}\n', ["line 1", "'prompt'", "int"]),
        ('{"messages": [{"role": "user", "content": "x"}]}\n', ["line 1", "assistant"]),
        ('{"messages": [{"role": "user"}]}\n', ["line 1", "message 1"]),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, content: str, words: list[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        load_samples([path], tokenizer(), 50)
    assert "bad.jsonl" in str(caught.value) and all(w in str(caught.value) for w in words), (
        caught.value
    )


def test_what_is_only_asked_needs_no_answer(tmp_path: Path) -> None:
    """Questions to answer, to calibrate or to tune on; training needs their answers."""
    path = tmp_path / "questions.jsonl"
    records = [
        {"question": "Why?", "sample": 3},
        {"prompt": "Go on."},
        {"instruction": "Sum.", "input": "1 2"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        {"question": "Who?", "answer": "I."},
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    found = read_conversations(path, answered=False)
    assert [one.turns for one in found] == [
        (("user", "Why?"),),
        (("user", "Go on."),),
        (("user", "Sum.\n1 2"),),
        (("system", "s"), ("user", "u")),
        (("user", "Who?"), ("assistant", "I.")),
    ]
    for n in range(4):
        path.write_text(json.dumps(records[n]))
        with pytest.raises(UserError, match="line 1"):
            read_conversations(path)
    path.write_text('{"title": "no question"}')
    with pytest.raises(UserError, match="each also without its answer"):
        read_conversations(path, answered=False)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*nothing\.jsonl: no such file"):
        read_conversations(tmp_path / "nothing.jsonl")
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    assert [found.text for found in read_conversations(marked)] == ["a", "b"]
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "\xe9"}')
    with pytest.raises(UserError, match="not UTF-8"):
        read_conversations(tmp_path / "latin.jsonl")
    (tmp_path / "long.jsonl").write_text('{"prompt": "abcdefgh", "completion": "x"}')
    with pytest.raises(UserError, match="max_length=5"):
        load_samples([tmp_path / "long.jsonl"], tokenizer(), 5)


def test_mask_marks_rows_whose_next_token_is_a_response() -> None:
    sample = Sample(np.array([5, 6, 7, 8], np.int32), np.array([False, False, True, True]))
    short = Sample(np.array([5, 9], np.int32), np.array([False, True]))
    batch = collate([sample, short])
    assert batch.mask.tolist() == [[False, True, True, False], [True, False, False, False]]
    assert batch.ids[1].tolist() == [5, 9, 0, 0]


def test_batches_cover_every_sample_once_within_the_budget() -> None:
    rng = np.random.default_rng(0)
    samples = [
        Sample(np.full(n, i, np.int32), np.ones(n, np.bool_))
        for i, n in enumerate(rng.integers(2, 60, 200))
    ]
    plan = BatchPlan(samples, 128, seed=4)
    for number in (0, 1):
        batches = plan.epoch(number)
        assert sorted(i for b in batches for i in b) == list(range(200))
        assert all(len(b) * max(len(samples[i].ids) for i in b) <= 128 for b in batches)
    assert plan.epoch(0) != plan.epoch(1)
    padded = sum(len(b) * max(len(samples[i].ids) for i in b) for b in plan.epoch(0))
    assert padded < 1.25 * sum(len(s.ids) for s in samples)
    whole = [b.ids for _, b in zip(range(2 * len(plan.epoch(0)) + 5), plan.batches(), strict=False)]
    odd = [b.ids for _, b in zip(range(len(whole) // 2), plan.batches(1, 2), strict=False)]
    assert all((a == b).all() for a, b in zip(whole[1::2], odd, strict=True))


def test_self_instruct_seeds_have_a_sample_for_each_instance(tmp_path: Path) -> None:
    seed = {
        "id": "seed_task_0",
        "instruction": "ab",
        "is_classification": False,
        "instances": [{"input": "", "output": "ef"}, {"input": "cd", "output": "gh"}],
    }
    path = tmp_path / "seeds.jsonl"
    path.write_text(json.dumps(seed) + "\n")
    assert read_conversations(path) == [
        Conversation((("user", "ab"), ("assistant", "ef"))),
        Conversation((("user", "ab\ncd"), ("assistant", "gh"))),
    ]
    for instances in ([], 3, [3], [{"input": "x"}]):
        path.write_text(json.dumps({**seed, "instances": instances}) + "\n")
        with pytest.raises(UserError, match=r"line 1.*accepted|line 1: field 'instances'"):
            read_conversations(path)


def test_no_prompt_is_on_both_sides_of_the_split() -> None:
    """Like the file of 9,430 records with 317 instructions that made held-out figures look three
    times as good.
    """
    texts = [f"Question {n % 40}" if n % 3 else f"  question   {n % 40} " for n in range(1200)]
    samples = [
        encoded(Conversation((("user", t), ("assistant", f"{n}"))), tokenizer(), 99)
        for n, t in enumerate(texts)
    ]
    trained, heldout = set_aside(samples, 100, 0)
    assert heldout and trained and not {s.prompt for s in trained} & {s.prompt for s in heldout}
    assert (
        len({s.prompt for s in trained}) + len(heldout) == 40
    )  # each held-out prompt is evaluated once
    # Other order, more data: a prompt stays on its side.
    more = [
        encoded(Conversation((("user", f"more {n}"), ("assistant", "x"))), tokenizer(), 99)
        for n in range(300)
    ]
    trained_more, heldout_more = set_aside([*more, *reversed(samples)], 1000, 0)
    assert {s.prompt for s in heldout} <= {s.prompt for s in heldout_more}
    assert {s.prompt for s in trained} <= {s.prompt for s in trained_more}
    assert len(set_aside(more, 5, 0)[1]) == 5 and set_aside(samples[:1], 5, 0) == (samples[:1], [])


def test_conversations_tokenised_together_are_what_each_is_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_module, "TOKENISED_TOGETHER", 3)
    two = (("user", "ab"), ("assistant", "cd"), ("user", "ef"), ("assistant", "gh"))
    conversations = [
        Conversation(two),
        Conversation(two[:2]),
        Conversation(text="abcdef"),
        Conversation(two[:1]),  # nothing is said: no tokens
        Conversation(two[:3]),
        Conversation((("user", "a"), ("assistant", "bcdefgh"))),
        Conversation(two),
    ]
    together = list(encode(conversations, tokenizer(), 9))
    assert len(together) == len(conversations) and len(together[3].ids) == 0
    for conversation, sample in zip(conversations, together, strict=True):
        alone = encoded(conversation, tokenizer(), 9)
        assert np.array_equal(sample.ids, alone.ids) and len(sample.ids) <= 9
        assert np.array_equal(sample.response, alone.response)
        assert sample.prompt == alone.prompt


THINKS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{{ lead if loop.last and m.role == 'assistant' }}"
    "{{ m.content.split('</t>')[-1] if not loop.last else m.content }}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' + begin }}{% endif %}"
)
TWO = (("user", "a"), ("assistant", "<t>no</t>b"), ("user", "c"), ("assistant", "d"))


def told(sample: Sample) -> tuple[str, str]:
    """(what is read, what is to be said)"""
    words = tokenizer()
    return words.decode(sample.ids[~sample.response]), words.decode(sample.ids[sample.response])


def test_turns_after_rewritten_ones_are_samples_of_their_own() -> None:
    words = tokenizer()
    words.chat_template = "{% set lead, begin = '', '' %}" + THINKS
    first, second = map(told, encode([Conversation(TWO)], words, 99))
    assert first == ("<|user|>a<|end|><|assistant|>", "<t>no</t>b<|end|>")
    assert second == (
        "<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>",
        "d<|end|>",
    )


@pytest.mark.parametrize("answer", ["d", "t", "t t", "e", ""])  # in the thoughts or the end, too
def test_thoughts_that_a_template_puts_in_are_not_to_be_learnt(answer: str) -> None:
    words = tokenizer()
    words.chat_template = "{% set lead, begin = '<t></t>', '' %}" + THINKS
    [sample] = encode([Conversation((TWO[2], ("assistant", answer)))], words, 99)
    assert told(sample) == ("<|user|>c<|end|><|assistant|><t></t>", answer + "<|end|>")


def test_a_prompt_that_begins_thoughts_loses_no_answer() -> None:
    words = tokenizer()
    words.chat_template = "{% set lead, begin = '', '<t>' %}" + THINKS
    [sample] = encode([Conversation(TWO[2:])], words, 99)
    assert told(sample) == ("<|user|>c<|end|><|assistant|>", "d<|end|>")


def test_what_is_left_out_is_said_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    long, short = {"instruction": "a" * 50, "output": "b"}, {"instruction": "a", "output": "b"}
    rows = [long, short, {"text": ""}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.warns(Notice, match=r"2 of 3 .*1 none within max_length=20, 1 none at all"):
        assert len(load_samples([path], tokenizer(), 20)) == 1
    path.write_text(json.dumps(long) + "\n")
    with pytest.raises(UserError, match=r"1 none within max_length=20\); raise max_length"):
        load_samples([path], tokenizer(), 20)
    path.write_text(json.dumps({"text": ""}) + "\n")
    with pytest.raises(UserError, match=r"1 none at all\); add answers"):
        load_samples([path], tokenizer(), 20)
