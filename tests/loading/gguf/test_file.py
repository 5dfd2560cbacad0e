"""Damaged GGUF files end in one sentence, whatever is wrong with them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from loading.gguf import tiny_files
from multirate.errors import UserError
from multirate.loading.gguf.file import GgufFile
from multirate.loading.gguf.load import load_gguf


def test_metadata_and_tensors(tmp_path: Path) -> None:
    file = GgufFile(tiny_files.write(tmp_path / "m.gguf"))
    assert file.architecture == "llama" and file.metadata["llama.block_count"] == 2
    assert file.metadata["tokenizer.ggml.tokens"] == tiny_files.TOKENS
    assert file.tensors["blk.0.ffn_up.weight"].shape == (96, 64)


def test_files_that_are_no_gguf_files(tmp_path: Path) -> None:
    for content, words in (
        (b"", "is empty"),
        (b"PK\x03\x04 and more", "not a GGUF file"),
        (b"GGUF\x01\x00\x00\x00" + bytes(32), "version 1"),
        (b"GGUF\x00\x00\x00\x03" + bytes(32), "byte order"),
    ):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(UserError, match=words):
            GgufFile(tmp_path / "x.gguf")
    with pytest.raises(UserError, match="no such file"):
        GgufFile(tmp_path / "none.gguf")


def test_every_truncation_is_one_sentence(tmp_path: Path) -> None:
    whole = tiny_files.write(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    draw = random.Random(0)
    lengths = [5, 23, *(draw.randrange(5, len(whole) - 64) for _ in range(60))]
    for length in lengths:
        cut.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"truncated or damaged.*download it again"):
            GgufFile(cut)


def test_altered_bytes_never_end_in_a_traceback(tmp_path: Path) -> None:
    whole = tiny_files.write(tmp_path / "m.gguf").read_bytes()
    header = whole.index(b"token_embd.weight") + 900
    damaged, draw, refused = tmp_path / "damaged.gguf", random.Random(1), 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 3))):
            data[draw.randrange(4, header)] = draw.randrange(256)
        damaged.write_bytes(data)
        try:
            GgufFile(damaged)
        except UserError as error:
            refused += 1
            assert str(damaged) in str(error) and "\n" not in str(error)
    assert refused > 10


@pytest.mark.parametrize(
    "key", ["block_count", "embedding_length", "attention.head_count", "context_length"]
)
def test_a_size_that_is_not_the_weights(key: str, tmp_path: Path) -> None:
    whole = bytearray(tiny_files.write(tmp_path / "m.gguf").read_bytes())
    at = whole.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4
    for value in (0, 3, 2**31 - 1):
        if key == "context_length" and value:
            continue  # any is possible
        whole[at : at + 4] = value.to_bytes(4, "little")
        (tmp_path / "x.gguf").write_bytes(whole)
        with pytest.raises(UserError, match=r"x\.gguf"):
            load_gguf(tmp_path / "x.gguf")
