"""Own answers are trained on as the tokens that the model said, whatever a chat template makes of
their text.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from script_file import load_script
from transformers import LlamaConfig, LlamaForCausalLM

from multirate.decoding.continuous import generate_continuously
from multirate.decoding.stopping import StopSettings
from multirate.errors import Notice, UserError
from multirate.runtime.decoder import Decoder
from multirate.runtime.load import load_decoder
from multirate.training.data import Sample, load_samples, render_prompt
from multirate.training.own_answers import answer_questions, read_questions

from . import tiny

END = 3
NEVER = 1 << 20
TURN = "{{ '<|' + m['role'] + '|>' }}"
INSERTS = (
    "{% for m in messages %}" + TURN + "{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<think></think>' }}{% endif %}{{ m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Empty thoughts before the last answer, none in earlier ones."""
BEGINS = (
    "{% for m in messages %}" + TURN + "{{ m['content'].split('k>')[-1] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|><think>' }}{% endif %}"
)
"""The model always thinks first; its thoughts are left out of what it reads later."""
STRIPS = (
    "{% for m in messages %}" + TURN + "{{ m['content'] | trim | upper + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny.tokenizer()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        initializer_range=0.3,
    )
    return load_decoder(LlamaForCausalLM(config).eval())


def tokenizer(template: str = tiny.TEMPLATE) -> Any:
    found = tiny.tokenizer()
    found.chat_template = template
    return found


def said(decoder: Decoder, prompt: list[int], eos: int, most: int) -> list[int]:
    prompts = iter([prompt])
    stop = StopSettings(max_new_tokens=most, eos_token_ids=(eos,))
    [answer] = generate_continuously(decoder, lambda: next(prompts, None), 1, stop=stop)
    return answer.tokens


def asked(path: Path, *questions: str) -> Path:
    turns = [{"role": "user", "content": question} for question in questions]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    return path


def answered(decoder: Decoder, words: Any, data: Path, out: Path, eos: int, most: int) -> None:
    answer_questions(decoder, words, read_questions([data]), out, (eos,), most)


def spoken(sample: Sample) -> list[int]:
    return sample.ids[sample.response].tolist()


@pytest.mark.parametrize("template", [tiny.TEMPLATE, INSERTS, BEGINS, STRIPS])
@pytest.mark.parametrize("ends", [False, True])
def test_samples_are_what_was_said(
    decoder: Decoder, tmp_path: Path, template: str, ends: bool
) -> None:
    """Whatever the template does to an answer; with an end only where there was one."""
    words, out = tokenizer(template), tmp_path / "own.jsonl"
    questions = ["abc", "de", "fgh"]
    data = asked(tmp_path / "data.jsonl", *questions)
    first = words(render_prompt(words, [("user", "abc")]), add_special_tokens=False)["input_ids"]
    eos = said(decoder, first, NEVER, 5)[2] if ends else END
    answered(decoder, words, data, out, eos, 5)
    [record] = map(json.loads, out.read_text().splitlines())
    texts = [turn["content"] for turn in record["messages"] if turn["role"] == "assistant"]
    assert record["said"][0]["ended"] == ("eos" if ends else "length")
    expected, prompts, turns = [], [], []
    for question, text in zip(questions, texts, strict=True):
        turns.append(("user", question))
        prompts.append(words(render_prompt(words, turns), add_special_tokens=False)["input_ids"])
        expected.append(said(decoder, prompts[-1], eos, 5))
        assert text == words.decode(expected[-1], skip_special_tokens=True)
        turns.append(("assistant", text))
    samples = load_samples([out], words, 512)
    assert list(chain.from_iterable(map(spoken, samples))) == list(chain.from_iterable(expected))
    whole = [sample.ids.tolist() for sample in samples]
    for prompt, answer in zip(prompts, expected, strict=True):  # after what the model had read
        assert any(ids[: len(prompt) + len(answer)] == prompt + answer for ids in whole)


def test_text_of_another_tokenizer_is_text(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edited text, too; an answer that was cut off gets no end even then."""
    words, out = tokenizer(), tmp_path / "own.jsonl"
    answered(decoder, words, asked(tmp_path / "data.jsonl", "abc"), out, END, 5)
    record = json.loads(out.read_text())
    for ended, end in (("length", []), ("eos", [END])):
        record["output"] = "hand-made"
        record["said"][0]["ended"] = ended
        out.write_text(json.dumps(record) + "\n")
        monkeypatch.setattr("multirate.errors._said", set())
        with pytest.warns(Notice, match="used for training as text"):
            [sample] = load_samples([out], words, 512)
        assert spoken(sample) == words("hand-made")["input_ids"] + end


@pytest.mark.parametrize(
    "field, value",
    [
        ("said", "abc"),
        ("said", [1]),
        ("prompt", None),
        ("answer", [1.5]),
        ("answer", [True]),
        ("answer", [-1]),
        ("answer", [1 << 40]),
        ("ended", "never"),
        ("ended", ["eos"]),
    ],
)
def test_odd_records_are_refused(tmp_path: Path, field: str, value: Any) -> None:
    one = {"prompt": [5], "answer": [6], "ended": "eos"}
    record: dict[str, Any] = {"multirate": "answers", "instruction": "a", "output": "b"}
    record["said"] = value if field == "said" else [{**one, field: value}]
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(UserError, match=f"line 1: .*{field}"):
        load_samples([path], tokenizer(), 64)


def test_the_gpu_recipe_writes_the_same_records(tmp_path: Path) -> None:
    script, words = load_script("lab/recipes/smollm2/answers_on_gpu.py"), tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    questions = ["abc", "de"]
    decoder = load_decoder(model, "hf")
    prompts = [script.prompt_ids(words, question) for question in questions]
    answer = said(decoder, prompts[0], NEVER, 6)
    eos, out = answer[3], tmp_path / "own.jsonl"
    with torch.no_grad():
        weights = script.Weights(model, torch.device("cpu"))
        script.answer_all(weights, words, questions, out, 6, 2, eos, "a model")
    samples = {sample.prompt: spoken(sample) for sample in load_samples([out], words, 64)}
    assert samples == {q: said(decoder, p, eos, 6) for q, p in zip(questions, prompts, strict=True)}
    assert {samples[q][-1] == eos for q in questions} == {True, False}
