"""A GGUF file's texts begin and end as llama.cpp has them begin and end."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from loading.gguf import tiny_files
from loading.gguf.raw_file import RawFile
from multirate.errors import Notice, UserError
from multirate.loading.gguf.load import load_gguf

T = "tokenizer.ggml."
SCORES = [-float(index) for index in range(len(tiny_files.TOKENS))]
HE = tiny_files.TOKENS.index("he")


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multirate.errors._said", set())


def load(folder: Path, **changes: Any) -> tuple[Any, Any]:
    """A tiny file's model and tokenizer; changes: keys, "ggml_" for "tokenizer.ggml."; None: the
    file has no such key.
    """
    keys = {name.replace("ggml_", T): value for name, value in changes.items()}
    file = RawFile.read(tiny_files.write(folder / "whole.gguf"))
    kept = [(key, value) for key, value in file.metadata if key not in keys]
    file.metadata = kept + [(key, value) for key, value in keys.items() if value is not None]
    return load_gguf(file.write(folder / "tiny.gguf"))


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({"ggml_bos_token_id": 2}, [HE]),
        ({"ggml_bos_token_id": 2, "ggml_add_bos_token": True}, [2, HE]),
        ({"ggml_bos_token_id": 2, "ggml_pre": "llama-bpe"}, [2, HE]),
        ({"ggml_bos_token_id": 2, "ggml_pre": "tekken"}, [2, HE]),
        ({"ggml_bos_token_id": 2, "ggml_pre": "qwen2"}, [HE]),
        (
            {"ggml_bos_token_id": 2, "ggml_pre": "llama-bpe", "ggml_add_bos_token": False},
            [HE],
        ),
        ({"ggml_add_bos_token": True}, [HE]),  # and no BOS to add
        ({"ggml_add_eos_token": True}, [HE, 1]),
        ({"ggml_model": "llama", "ggml_scores": SCORES, "ggml_bos_token_id": 2}, [2, HE]),
        ({"ggml_model": "llama", "ggml_scores": SCORES}, [1, HE]),  # llama.cpp's default
        ({"ggml_model": "llama", "ggml_scores": SCORES, "ggml_add_bos_token": False}, [HE]),
    ],
)
def test_what_a_text_begins_and_ends_with(
    changes: dict[str, Any], ids: list[int], tmp_path: Path
) -> None:
    _, tokenizer = load(tmp_path, **changes)
    assert tokenizer("he")["input_ids"] == ids
    assert tokenizer("he", add_special_tokens=False)["input_ids"] == [HE]
    tokenizer.save_pretrained(tmp_path / "kept")
    assert AutoTokenizer.from_pretrained(tmp_path / "kept")("he")["input_ids"] == ids


def test_a_vocabulary_of_whole_words_is_read_before_its_merges(tmp_path: Path) -> None:
    tokens = [*tiny_files.TOKENS[:-1], "xyz"]
    for split, expected in (("llama-bpe", [len(tokens) - 1]), ("gpt-2", None)):
        _, tokenizer = load(tmp_path, ggml_tokens=tokens, ggml_pre=split, ggml_merges=["h e"])
        ids = tokenizer("xyz")["input_ids"]
        assert ids == (expected or [tokens.index(letter) for letter in "xyz"])


def test_ends_that_no_key_names(tmp_path: Path) -> None:
    """Known by llama.cpp, whatever type the file gives the token; or used by the template."""
    none = {"ggml_eot_token_id": None}
    model, _ = load(tmp_path, **none)
    assert model.generation_config.eos_token_id == [1, 4]  # <|end|> is one of llama.cpp's
    model, tokenizer = load(tmp_path, **none, ggml_token_type=[1] * len(tiny_files.TOKENS))
    assert model.generation_config.eos_token_id == [1, 4]
    assert tokenizer("he<|end|>")["input_ids"] == [HE, 4]
    tokens = [token.replace("<|end|>", "<|fin|>") for token in tiny_files.TOKENS]
    template = tiny_files.TEMPLATE.replace("<eos>", "<|fin|>\n")
    with pytest.warns(Notice, match=r"no field names the end-of-turn token; using '<\|fin\|>'"):
        model, _ = load(tmp_path, **none, ggml_tokens=tokens, **{TEMPLATE: template})
    assert model.generation_config.eos_token_id == [1, 4]
    spaced = tiny_files.TEMPLATE.replace("<eos>", "\n\n### ")
    with pytest.warns(Notice, match="ends a turn with text that is not a single token"):
        model, _ = load(tmp_path, **none, ggml_tokens=tokens, **{TEMPLATE: spaced})
    assert model.generation_config.eos_token_id == 1


TEMPLATE = "tokenizer.chat_template"


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ raise_exception('no') }}",
        "{% for",
        "{{ messages[-1].content }}",
        "{{ 1 / 0 }}",
        "{{ undefined.attribute }}",
    ],
)
def test_templates_that_show_no_end(template: str | None, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        model, tokenizer = load(tmp_path, **{TEMPLATE: template})
    assert model.generation_config.eos_token_id == [1, 4]
    assert tokenizer.chat_template == template


def test_a_token_of_no_text_is_named_and_two_of_one_text_are_refused(tmp_path: Path) -> None:
    tokens = [*tiny_files.TOKENS[:-2], "", ""]
    _, tokenizer = load(tmp_path, ggml_tokens=tokens, ggml_merges=[])
    assert len(tokenizer) == len(tokens)
    with pytest.raises(UserError, match=r"tokenizer\.ggml\.tokens has 'h' twice"):
        load(tmp_path, ggml_tokens=[*tiny_files.TOKENS[:-1], "h"], ggml_merges=[])


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_no_token_is_beyond_the_vocabulary(model: str, tmp_path: Path) -> None:
    """transformers' classes add <|endoftext|>, <s> or <unk>, for which the model has no row."""
    _, tokenizer = load(tmp_path, ggml_model=model, ggml_scores=SCORES)
    assert len(tokenizer) == len(tiny_files.TOKENS)
    assert max(tokenizer("he<|endoftext|><s><unk></s>")["input_ids"]) < len(tokenizer)
