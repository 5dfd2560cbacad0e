import gzip
import json
from pathlib import Path

import pytest

from lab.bench import tiny_model
from multirate.errors import UserError
from multirate.lab.bench.prompts import build_prompts
from multirate.lab.bench.suites import READERS, Question, load_suite
from multirate.loading.chat_template import encode_chat


def write(path: Path, *records: object) -> Path:
    path.write_text(
        "\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n",
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize(
    ("suite", "record", "expected"),
    [
        (
            "mt_bench",
            {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
            [("81", ("a", "b"), "writing")],
        ),
        (
            "spec_bench",
            {"question_id": 5, "category": "qa", "turns": ["only"]},
            [("5", ("only",), "qa")],
        ),
        (
            "self_instruct",
            {
                "id": "t0",
                "instruction": "Do.",
                "instances": [{"input": "x", "output": "y"}, {"input": ""}],
            },
            [("t0.0", ("Do.\n\nx",), None), ("t0.1", ("Do.",), None)],
        ),
        ("koala", {"id": "k", "prompt": "hello"}, [("k", ("hello",), None)]),
        ("wizardlm", {"Instruction": "hello"}, [("1", ("hello",), None)]),
        ("gsm8k", {"question": "1+1?", "answer": "2"}, [("1", ("1+1?",), None)]),
        (
            "humaneval",
            {"task_id": "HumanEval/0", "prompt": "def f():", "test": "assert f()"},
            [("HumanEval/0", ("def f():",), None)],
        ),
        (
            "spec_bench",
            {"question_id": 81, "category": "stem", "turns": ["a", "b"]},
            [("81", ("a", "b"), "multi_turn")],
        ),
        ("text", {"text": "once"}, [("1", ("once",), None)]),
    ],
)
def test_formats(tmp_path: Path, suite: str, record: dict, expected: list) -> None:
    questions = load_suite(suite, write(tmp_path / "q.jsonl", record))
    assert [(q.id, q.turns, q.category) for q in questions] == expected


def test_limit_blank_lines_and_byte_order_mark(tmp_path: Path) -> None:
    path = write(
        tmp_path / "q.jsonl",
        "\ufeff" + json.dumps({"text": "é1"}),
        "",
        {"text": "2"},
        {"text": "3"},
    )
    assert [q.turns[0] for q in load_suite("text", path, limit=2)] == ["é1", "2"]
    assert [q.id for q in load_suite("text", path)] == ["1", "3", "4"]  # line numbers of the file
    path = write(tmp_path / "six.jsonl", *({"text": str(n)} for n in range(6)))
    assert [q.turns[0] for q in load_suite("text", path, limit=3)] == ["0", "2", "4"]
    assert len(load_suite("text", path, limit=9)) == 6


@pytest.mark.parametrize("suite", list(READERS))
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "line 2: not valid JSON"),
        ("[1]", "line 2: expected a JSON object, found list"),
        ("{}", "line 2 does not fit suite "),
    ],
)
def test_malformed_lines_name_file_and_line(
    tmp_path: Path, suite: str, line: str, message: str
) -> None:
    good = {
        "turns": ["a"],
        "instruction": "a",
        "instances": [{"input": "a"}],
        "prompt": "a",
        "Instruction": "a",
        "question": "a",
        "text": "a",
    }
    path = write(tmp_path / "bad.jsonl", good, line)
    with pytest.raises(UserError) as caught:
        load_suite(suite, path)
    assert f"{path}, {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("suite", "record"),
    [
        ("mt_bench", {"turns": "a"}),
        ("mt_bench", {"turns": ["a", " "]}),
        ("self_instruct", {"instruction": "a", "instances": []}),
        ("self_instruct", {"instruction": "a", "instances": [{"input": 3}]}),
        ("koala", {"prompt": 3}),
    ],
)
def test_wrong_fields(tmp_path: Path, suite: str, record: dict) -> None:
    with pytest.raises(UserError, match=r"line 1 does not fit suite \w+: it needs"):
        load_suite(suite, write(tmp_path / "bad.jsonl", record))


def test_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown suite 'glue'; accepted: mt_bench"):
        load_suite("glue", tmp_path)
    with pytest.raises(UserError, match=r"cannot read .*none\.jsonl: no such file"):
        load_suite("text", tmp_path / "none.jsonl")
    with pytest.raises(UserError, match=r"cannot read .*: is a directory"):
        load_suite("text", tmp_path)
    with pytest.raises(UserError, match="has no questions"):
        load_suite("text", write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(UserError, match="at least 1"):
        load_suite("text", write(tmp_path / "one.jsonl", {"text": "a"}), limit=0)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match="line 1: not UTF-8"):
        load_suite("text", binary)


def test_second_turn_follows_the_models_own_answer() -> None:
    words = tiny_model.tokenizer()
    asked: list[str] = []

    def answer(prompt: list[int]) -> list[int]:
        asked.append(words.decode(prompt))
        return words.encode(" fine <eos>")

    made = build_prompts(
        [Question("7", ("how?", "why?"))], words, answer, max_positions=200, max_new_tokens=10
    )
    assert [(p.id, p.follows) for p in made.prompts] == [("7#1", False), ("7#2", True)]
    assert asked == ["<|user|>how?<eos><|assistant|>"]
    assert words.decode(made.prompts[1].tokens) == (
        "<|user|>how?<eos><|assistant|>fine<eos><|user|>why?<eos><|assistant|>"
    )


def test_long_prompts_are_skipped_with_their_later_turns_or_cut_from_the_left() -> None:
    words = tiny_model.tokenizer()
    questions = [
        Question("a", ("x" * 60, "y")),
        Question("b", ("short",)),
        Question("c", ("ok", "z" * 60, "w")),
    ]
    settings = dict(max_positions=50, max_new_tokens=10)
    made = build_prompts(questions, words, lambda p: [], **settings)
    assert [p.id for p in made.prompts] == ["b", "c#1"]
    assert made.skipped == ["a#1", "a#2", "c#2", "c#3"]

    cut = build_prompts(questions[:1], words, lambda p: [], truncate=True, **settings)
    whole = encode_chat(words, [{"role": "user", "content": "x" * 60}])
    assert cut.prompts[0].tokens == whole[-40:]
    assert cut.truncated[0] == "a#1" and not cut.skipped

    with pytest.raises(UserError, match="none of the 1 questions fits"):
        build_prompts(questions[:1], words, lambda p: [], **settings)
    with pytest.raises(UserError, match="at most 49"):
        build_prompts(questions, words, lambda p: [], max_positions=50, max_new_tokens=50)


def test_no_chat_template_is_plain_text() -> None:
    words = tiny_model.tokenizer()
    words.chat_template = None
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert words.decode(encode_chat(words, messages)) == "a\n\nb"


def test_compressed_files_and_what_only_claims_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl.gz"
    whole = gzip.compress(b'{"text": "once"}\n{"text": "upon"}\n' * 50)
    path.write_bytes(whole)
    assert [q.turns for q in load_suite("text", path)][:2] == [("once",), ("upon",)]
    for broken in (b'{"text": "once"}\n', whole[:-9], whole[:20] + b"xxxxxxxx" + whole[28:]):
        path.write_bytes(broken)
        with pytest.raises(UserError, match=r"q\.jsonl\.gz"):
            load_suite("text", path)


def test_one_task_of_a_suite(tmp_path: Path) -> None:
    path = write(
        tmp_path / "q.jsonl",
        *({"category": c, "turns": [c]} for c in ("qa", "stem", "qa", "writing", "qa")),
    )
    assert [q.id for q in load_suite("spec_bench", path, task="multi_turn")] == ["2", "4"]
    assert [q.id for q in load_suite("spec_bench", path, limit=2, task="qa")] == ["1", "3"]
    with pytest.raises(UserError, match="'rag'; accepted: multi_turn, qa"):
        load_suite("spec_bench", path, task="rag")
    with pytest.raises(UserError, match="have no category"):
        load_suite("text", write(tmp_path / "t.jsonl", {"text": "once"}), task="qa")
