"""Tuned settings on disk: beside the accelerator or in the cache, one of a kind, checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multirate import tuned
from multirate.errors import Notice, UserError
from multirate.loading.hub import reference_accelerators
from multirate.tuned import FILE, Tuned

ONE = Tuned("sam", {"tokens": 7}, "base", "weights", "here", "2026-01-01", "12 of x", 5.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MULTIRATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_found_again_for_the_same_machine_and_weights(tmp_path: Path) -> None:
    path = tuned.place(tmp_path, "sam", "base")
    assert path == tmp_path / FILE
    tuned.store(path, ONE)
    tuned.store(path, replace(ONE, machine="there"))
    tuned.store(path, replace(ONE, settings={"tokens": 9}))
    assert len(tuned.read(path)) == 2
    found = tuned.find(tmp_path, "sam", "base", "weights", "here")
    assert found is not None and found.settings == {"tokens": 9}
    assert tuned.find(tmp_path, "sam", "base", "others", "here") is None


def test_in_the_cache_where_the_folder_is_not_the_users(cache: Path) -> None:
    own = next(iter(reference_accelerators("tiny").values()))
    for folder in (None, own):
        path = tuned.place(folder, "sam", "base")
        assert cache in path.parents
    tuned.store(path, ONE)
    assert tuned.find(own, "sam", "base", "weights", "here") == ONE
    assert tuned.find(None, "sam", "base", "weights", "here") == ONE


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": 1, "tuned": [{"method": 3}]}',
        '{"format": 1, "tuned": [3]}',
        '{"format": 1, "tuned": {"a": 1}}',
        '{"format": 9}',
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UserError, match=FILE):
        tuned.read(tmp_path / FILE)
    with pytest.warns(Notice, match=f"ignoring the tuned settings: .*{FILE}"):
        assert tuned.find(tmp_path, "sam", "base", "", "here") is None


@pytest.mark.parametrize("place", ["file", "file/below", "loop", "x" * 300, "/dev/null"])
def test_a_cache_that_cannot_be_used_holds_nothing(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.setenv("MULTIRATE_CACHE", str(tmp_path / place))
    assert tuned.find(None, "sam", "base", "", "here") is None
    with pytest.raises(UserError, match="cannot create the folder"):
        tuned.store(tuned.place(None, "sam", "base"), ONE)


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    for name in ("MULTIRATE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert tuned.find(None, "sam", "base", "", "here") is None
    with pytest.raises(UserError, match="cannot create the folder"):
        tuned.store(tuned.place(None, "sam", "base"), ONE)


@pytest.mark.parametrize("found", [5, None, {}, [5], [None], [[]], [{"method": 3}]])
def test_lists_of_another_kind_are_refused(tmp_path: Path, found: Any) -> None:
    path = tmp_path / FILE
    path.write_text(json.dumps({"format": 1, "tuned": found}))
    with pytest.raises(UserError, match=rf"{FILE}.*tuned"):
        tuned.read(path)
