"""A file that a command goes on with: nothing of a file that is not its own is changed."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from multirate.errors import UserError
from multirate.training.record_file import Records, beginning_of, look_at

FIRST, OTHER = beginning_of({"made_by": "us"}), beginning_of({"number": 1})[:-1]


def look(path: Path) -> Records:
    return look_at(path, FIRST, OTHER, "a record of ours")


def write(path: Path, *numbers: int) -> None:
    records = look(path)
    with records.append() as add:
        if not records.lines:
            add({"made_by": "us"})
        for number in numbers:
            add({"number": number})


@pytest.mark.parametrize(
    "content",
    [
        b'[{"instruction": "a"}]',  # a data set in one line
        b'[{"instruction": "a"}]\n',
        b'{"instruction": "a", "output": "b"}\n',
        b"notes without an end",
        b"\n",
        b'{"made_by": "others"}\n',
        b'{"made_by": "us"}\nnotes',
        b'{"made_by": "us"}\n{"number": 1}\n[1, 2',
        b"\x00\xff",
    ],
)
def test_files_of_others_are_untouched(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine"
    path.write_bytes(content)
    before = path.stat()
    with pytest.raises(UserError, match=f"{path}, line .: not a record of ours"):
        look(path)
    after = path.stat()
    assert path.read_bytes() == content and after.st_mtime_ns == before.st_mtime_ns


def test_a_half_written_line_is_all_that_is_cut_off(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    write(whole, 1, 2)
    for size in range(whole.stat().st_size):
        part.write_bytes(whole.read_bytes()[:size])
        records = look(part)
        assert part.stat().st_size == size  # looking changes nothing
        write(part, *[1, 2][max(0, len(records.lines) - 1) :])
        assert part.read_bytes() == whole.read_bytes()


def test_only_regular_files(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (Path("/dev/full"), Path("/dev/null"), Path("/dev/zero"), pipe, tmp_path):
        with pytest.raises(UserError, match="not a regular file"):
            look(path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    write(link, 1)
    assert link.is_symlink() and len(look(tmp_path / "file").lines) == 2


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, 1)
    before, other = look(path), look(path)
    with before.append() as add:
        with pytest.raises(UserError, match="being written by another process"), other.append():
            pass
        add({"number": 2})
    with pytest.raises(UserError, match="changed during the run"), other.append():
        pass
    assert [json.loads(line).get("number") for line in look(path).lines] == [None, 1, 2]


def test_a_full_disk_is_said_and_gone_on_from(tmp_path: Path) -> None:
    path = tmp_path / "file"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))
    try:
        with pytest.raises(UserError, match=f"cannot write {path}: file too large"):
            write(path, 1, 2, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.stat().st_size == 40
    write(path, 2, 3)
    assert [json.loads(line).get("number") for line in look(path).lines] == [None, 1, 2, 3]
