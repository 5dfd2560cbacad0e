"""Where a command writes: files that are not its own stay as they are, whatever they are."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from lab_files import MIXTURE
from typer.testing import CliRunner, Result

from multirate.cli.main import app

QUESTION = {"question_id": 1, "category": "c", "turns": ["hello there"]}
BENCH = ("bench", "tiny", "--suite", "mt_bench", "--methods", "autoregressive", "-n", "2")
COMMANDS = {
    "answers": ("answers", "tiny", "--max-new-tokens", "2", "--out"),
    "texts": ("texts", "tiny", "--out"),
    "inspect": ("inspect", "tiny", "-p", "hi", "-n", "2", "--out"),
    "bench": (*BENCH, "--repeats", "1", "--json"),
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"instruction": "a", "output": "b"} | QUESTION) + "\n")
    return path


def run(name: str, out: Path, data: Path) -> Result:
    more = [] if name == "inspect" else ["--data", str(data)]
    return CliRunner().invoke(app, [*COMMANDS[name], str(out), *more])


def refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, (result.output, result.exception)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and all(part in last for part in parts), last


@pytest.mark.parametrize("name", COMMANDS)
def test_files_of_others_are_refused(name: str, tmp_path: Path, data: Path) -> None:
    for content in (b"notes", b'{"a": 1}\n', b"\xff\x00", b"<!doctype html>\n"):
        path = tmp_path / "mine"
        path.write_bytes(content)
        refused(run(name, path, data), str(path), "choose another")
        assert path.read_bytes() == content
    before = data.read_bytes()
    refused(run(name, data, data), str(data))
    assert data.read_bytes() == before


@pytest.mark.parametrize("name", COMMANDS)
def test_only_regular_files_are_written(name: str, tmp_path: Path, data: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/null"), Path("/dev/full")):
        kind = stat.S_IFMT(path.stat().st_mode)
        refused(run(name, path, data), str(path), "not a regular file")
        assert stat.S_IFMT(path.stat().st_mode) == kind
    refused(run(name, tmp_path, data), str(tmp_path))


@pytest.mark.parametrize("name", COMMANDS)
def test_own_files_are_replaced_through_links(name: str, tmp_path: Path, data: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch(0o600)
    link.symlink_to(file)
    for _ in range(2):  # an empty file, then its own
        result = run(name, link, data)
        assert result.exit_code == 0, (result.output, result.exception)
    assert link.is_symlink() and file.stat().st_size > 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "file", "link"]


@pytest.mark.parametrize(
    "words, name",
    [
        (("train", "tiny", "--data", "{data}", "--steps", "1"), "README.md"),
        (("train", "tiny", "--data", "{data}", "--steps", "1"), "custom_generate"),
        (("train", "tiny", "--data", "{data}", "--overwrite"), "accelerator.json"),
        ((*BENCH, "--data", "{data}", "--report"), "results.json"),
        ((*BENCH, "--data", "{data}", "--report"), "report.html"),
        (("export", "tiny", "-a", "tiny", "--overwrite"), "config.json"),
        (("export", "tiny", "-a", "tiny", "--overwrite"), "model.safetensors"),
        (("pack", str(MIXTURE)), "packing.json"),
        (("pack", str(MIXTURE), "--force"), "experts.json"),
        (("pack", str(MIXTURE)), "experts.bin"),
        (("pack", str(MIXTURE)), "experts.bin.partial"),
        (("pack", str(MIXTURE)), "verified.json"),
    ],
)
def test_folders_with_files_of_others_are_refused(
    words: tuple[str, ...], name: str, tmp_path: Path, data: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / name).write_text('{"mine": 1}')
    given = [word.format(data=data) for word in words]
    out = [] if given[-1] == "--report" else ["--out"]
    refused(CliRunner().invoke(app, [*given, *out, str(folder)]), str(folder / name))
    assert [path.name for path in folder.iterdir()] == [name]
    assert (folder / name).read_text() == '{"mine": 1}'
