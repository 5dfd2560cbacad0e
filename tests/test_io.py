"""Files that appear whole, and JSON from anywhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from multirate.errors import UserError
from multirate.io import (
    check_text,
    check_writable,
    decoded,
    held,
    parse_json,
    read_text,
    write_atomically,
)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"caf\xc3\xa9", "café"),
        (b"\xef\xbb\xbfcaf\xc3\xa9", "café"),
        (b"\xef\xbb\xbf", ""),
        (b"", ""),
        (b"one\r\ntwo\rthree\n", "one\ntwo\nthree\n"),
        (b"a\0b", "a\0b"),
        ("a\ufeffb".encode(), "a\ufeffb"),
    ],
)
def test_text_from_outside(content: bytes, text: str, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(content)
    assert decoded(content, "x") == read_text(file) == text


@pytest.mark.parametrize(
    ("content", "place"),
    [(b"caf\xe9", 3), (b"\xef\xbb\xbf\xff", 3), ("hi".encode("utf-16"), 0), (b"\xc3", 0)],
)
def test_bytes_that_are_no_text(content: bytes, place: int, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"^x: not UTF-8 text .byte {place}.$"):
        decoded(content, "x")
    with pytest.raises(UserError, match=f"{file}: not UTF-8 text .byte {place}.$"):
        read_text(file)
    argument = content.decode(errors="surrogateescape")
    with pytest.raises(UserError, match=f"^--prompt: not UTF-8 text .byte {place}.$"):
        check_text(argument, "--prompt")
    assert check_text("café\0", "x") == "café\0"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "none", "no such file"),
        (tmp_path, "is a directory"),
        (f"{tmp_path}/a\0b", "null"),
    ):
        with pytest.raises(UserError, match=f"(?s)^cannot read .*: .*{reason}"):
            read_text(path)


def test_a_file_name_of_other_bytes_can_be_part_of_a_page(tmp_path: Path) -> None:
    write_atomically(tmp_path / "page", "of caf\udce9 and café")
    assert read_text(tmp_path / "page") == "of caf\\udce9 and café"


@pytest.mark.parametrize(
    "text", ['{"a": [1, "\\u00e9", null]}', '"\\ud83d\\ude00"', "1e999", '"é"']
)
def test_json_is_what_json_says(text: str) -> None:
    assert parse_json(text, "x") == parse_json(text.encode(), "x") == json.loads(text)
    assert parse_json("\ufeff" + text, "x") == parse_json(text.encode("utf-8-sig"), "x")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"a": 1', "x.json: not valid JSON"),
        ('{\n"a": 1\n', "x.json, line 3: not valid JSON"),
        ("[" * 200_000 + "]" * 200_000, "nested too deeply"),
        ("9" * 5000, "too many digits"),
        (b'"\xe9"', "not UTF-8"),
        ('{"text": "a\\ud800"}', "surrogate"),
        ('{"text": "a\\uDFFF"}', "surrogate"),
    ],
)
def test_what_is_not_json_is_refused_in_a_sentence(content: str | bytes, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        parse_json(content, "x.json")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 120


def test_names_as_long_as_the_system_takes_them_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * os.pathconf(tmp_path, "PC_NAME_MAX"))
    write_atomically(check_writable(path), "text")
    assert path.read_text() == "text"
    with pytest.raises(UserError, match="name too long"):
        check_writable(f"{path}n")


def test_a_link_to_itself_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(UserError, match="symbolic links"):
        check_writable(tmp_path / "link")


def test_a_folder_is_one_runs_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(UserError, match="written by another process")
    with held(tmp_path), refused, held(tmp_path):
        pass
    with held(tmp_path):
        pass
