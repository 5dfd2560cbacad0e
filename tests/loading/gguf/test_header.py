"""One wrong value in a header, whichever and wherever, ends in one sentence that names the file."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loading.gguf import tiny_files
from loading.gguf.raw_file import RawFile
from multirate.errors import UserError
from multirate.loading.gguf.load import load_gguf

KINDS = ("llama", "phi3_long", "gemma3", "qwen3moe")
NUMBERS = st.sampled_from(
    [
        *(0, 1, 2, 3, 7, -1, -(2**31), 2**16, 2**31, 2**40, 2**64 - 1),
        *(0.0, 0.5, -1.0, 1e-300, 1e300, math.nan, math.inf, -math.inf),
    ]
)
SCALARS = st.one_of(
    NUMBERS, st.booleans(), st.sampled_from(["", "x", "é", "4", "linear", "yarn", b"\xff\xfe"])
)
VALUES = st.one_of(
    SCALARS,
    NUMBERS.map(lambda value: [value]),
    NUMBERS.map(lambda value: [value] * 3),
    st.sampled_from([[], [1, 2], ["a", ""], [[1], [2]], [True], [b"\xff"]]),
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RawFile]:
    folder = tmp_path_factory.mktemp("original")
    names = dict.fromkeys(KINDS)
    return {n: RawFile.read(tiny_files.write(folder / f"{n}.gguf", n)) for n in names}


def check(file: RawFile, path: Path) -> bool:
    """Whether the file is refused, in one sentence; what loads can also be used."""
    file.write(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, tokenizer = load_gguf(path, torch.float32)
        except UserError as error:
            assert str(path) in str(error) and "\n" not in str(error), error
            return True
        ids = tokenizer("hello <|user|> é\n")["input_ids"]
        assert all(0 <= token < len(tiny_files.TOKENS) for token in ids)
        with torch.inference_mode():
            model(torch.tensor([ids]))
    return False


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_one_changed_value(data: st.DataObject, originals: Any, tmp_path_factory: Any) -> None:
    file = copy.deepcopy(originals[data.draw(st.sampled_from(KINDS))])
    at = data.draw(st.integers(0, len(file.metadata) - 1))
    key, value = file.metadata[at]
    if isinstance(value, list) and data.draw(st.booleans()):  # one element, or one too few
        place = data.draw(st.integers(0, len(value) - 1))
        new = data.draw(SCALARS)
        same = isinstance(new, (str, bytes)) == isinstance(value[0], str)
        same = same and isinstance(new, float) == isinstance(value[0], float)
        file.metadata[at] = (key, [*value[:place], *([new] if same else []), *value[place + 1 :]])
    elif data.draw(st.integers(0, 9)) == 0:
        del file.metadata[at]
    else:
        file.metadata[at] = (key, data.draw(VALUES))
    check(file, tmp_path_factory.getbasetemp() / "changed.gguf")


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_one_changed_tensor_record(
    data: st.DataObject, originals: Any, tmp_path_factory: Any
) -> None:
    file = copy.deepcopy(originals[data.draw(st.sampled_from(KINDS))])
    record = data.draw(st.sampled_from(file.tensors))
    field = data.draw(st.sampled_from(["name", "shape", "kind", "offset", "gone"]))
    sizes = st.sampled_from([0, 1, 2, 31, 32, 64, 2**20, 2**40, 2**63, 2**64 - 1])
    if field == "gone":
        file.tensors.remove(record)
    else:
        new = {
            "name": st.sampled_from(["", "blk.0.x", "rope_freqs.weight", "token_embd.weight"]),
            "shape": st.lists(sizes, max_size=5) | st.just(record.shape[::-1]),
            "kind": st.integers(0, 45) | st.just(2**32 - 1),
            "offset": st.sampled_from([1, 32, 2**20, 2**40, 2**64 - 1]),
        }[field]
        setattr(record, field, data.draw(new))
    check(file, tmp_path_factory.getbasetemp() / "changed.gguf")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.attention.head_count_kv", 3, "head_count_kv is 3"),
        ("llama.block_count", "two", "block_count is 'two'"),
        ("llama.rope.freq_base", math.nan, "freq_base is nan"),
        ("llama.attention.layer_norm_rms_epsilon", -1.0, "epsilon is -1.0"),
        ("tokenizer.ggml.eos_token_id", 5000, "eos_token_id is 5000"),
        ("tokenizer.ggml.merges", ["h q"], "merges is 'h q'"),
        ("tokenizer.ggml.tokens", tiny_files.TOKENS[:-1], "262 tokens.* 263 rows"),
        ("tokenizer.ggml.tokens", [*tiny_files.TOKENS[:-1], "he"], "'he' twice"),
        ("tokenizer.ggml.token_type", [3], "token_type .* list of 263"),
        ("tokenizer.ggml.add_bos_token", 1, "add_bos_token is 1"),
        ("tokenizer.ggml.model", "wordpiece", "model is 'wordpiece'"),
        ("tokenizer.chat_template", 3, "chat_template is 3"),
        ("llama.attention.causal", False, "attention.causal is False"),
        ("llama.attention.value_length", "1\n6", r"value_length is '1\\n6'"),
        (
            "llama.rope.scaling.type",
            "x" * 9999,
            "scaling.type is 'x{9,20}[.]{3}x+'; accepted: none",
        ),
        ("split.count", "1\n" * 9999, r"one of '1\\n1\\n.{,40} parts"),
        ("general.alignment", "x" * 9999, "alignment 'x{9,20}[.]{3}x+'"),
        ("general.architecture", "x" * 9999, "architecture 'x{9,20}[.]{3}x+' are not supported"),
    ],
)
def test_the_sentence_names_the_key(
    key: str, value: Any, words: str, originals: dict[str, RawFile], tmp_path: Path
) -> None:
    file = copy.deepcopy(originals["llama"])
    file.metadata = [(k, v) for k, v in file.metadata if k != key] + [(key, value)]
    with pytest.raises(UserError, match=f"x.gguf.*{words}"):
        load_gguf(file.write(tmp_path / "x.gguf"))


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight\n", "x" * 64, "é" * 32])
def test_names_of_tensors_that_llama_cpp_has_no_room_for_or_nobody_can_read(
    name: str, originals: dict[str, RawFile], tmp_path: Path
) -> None:
    file = copy.deepcopy(originals["llama"])
    file.tensors[0].name = name
    with pytest.raises(UserError, match=r"names a tensor '.{,60}'; download it again") as caught:
        load_gguf(file.write(tmp_path / "x.gguf"))
    assert "\n" not in str(caught.value)
