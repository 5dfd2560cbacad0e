"""Names of models as people have them, and damaged folders of models: one sentence each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from multirate import attach
from multirate.errors import UserError
from multirate.loading.hub import load_model, load_tokenizer, resolve_accelerator

TINY = Path(__file__).resolve().parent.parent / "src/multirate/reference/tiny/model"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("multirate.loading.hub._hub_answers", lambda: False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("owner/model-GGUF:Q4_K_M", r"write owner/model-GGUF:FILE\.gguf"),
        ("hf.co/owner/model-GGUF:Q4_K_M", r"write owner/model-GGUF:FILE\.gguf"),
        ("owner/model-GGUF:latest", r"owner/model-GGUF/tree/main lists the files"),
        ("owner/m:a-00001-of-00003.gguf", "one of 3 parts.*--merge"),
        ("hf.co/owner/model", "^model owner/model is not on this machine"),
        ("hf://owner/model", "^model owner/model is not on this machine"),
        ("https://huggingface.co/owner/model/", "^model owner/model is not on this machine"),
        ("https://huggingface.co/owner/model/tree/main", "^model owner/model is not"),
        ("https://huggingface.co/o/m/blob/main/a.gguf", r"^model o/m:a\.gguf is not"),
        ("huggingface.co/o/m/resolve/main/b/a.gguf?download=true", r"^model o/m:b/a\.gguf is not"),
        ("hf.co/o/m:a.gguf", r"^model o/m:a\.gguf is not"),
        ("https://huggingface.co/", "there is no folder"),
        ("https://example.org/model", "there is no folder"),
        ("x" * 5000, "cannot be loaded: file name too long"),
        ("model:7b", "not found"),
        ("a\0b", "not found"),
    ],
)
def test_names_of_the_hub(name: str, words: str) -> None:
    for load in (load_model, load_tokenizer):
        with pytest.raises(UserError, match=words):
            load(name)


def test_an_accelerators_address() -> None:
    with pytest.raises(UserError, match=r"^accelerator owner/drafter is not on this machine"):
        resolve_accelerator("https://huggingface.co/owner/drafter")


def rewritten(file: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(content)


def without(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def changed(file: str, **values: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        found = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(found | values))

    return change


def cut(file: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:size])


def weights(**change: Any) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        name = sorted(tensors)[1]
        tensors[name] = change["of"](tensors[name])
        save_file(tensors, path, metadata={"format": "pt"})

    return rewrite


def without_weight(name: str) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        del tensors[name]
        save_file(tensors, path, metadata={"format": "pt"})

    return rewrite


def sharded(index: Any) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return rewrite


CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer.json", "generation_config.json"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "config null": (rewritten(CONFIG, b"null"), r"config\.json is None; accepted: an object"),
    "config a list": (rewritten(CONFIG, b"[1]"), r"config\.json is \[1\]"),
    "config cut": (cut(CONFIG, 90), r"config\.json.*not valid JSON"),
    "config nested": (rewritten(CONFIG, b"[" * 10**5), r"config\.json.*nested too deeply"),
    "config bytes": (rewritten(CONFIG, b"\xff\xfe{"), r"config\.json"),
    "config empty": (rewritten(CONFIG, b"{}"), "cannot be loaded"),
    "no config": (without(CONFIG), "no config.json"),
    "hidden_size 3": (changed(CONFIG, hidden_size=3), "hidden size"),
    "hidden_size text": (changed(CONFIG, hidden_size="x"), "hidden_size"),
    "no heads": (changed(CONFIG, num_attention_heads=0), "ZeroDivisionError"),
    "layers 10^400": (changed(CONFIG, num_hidden_layers=10**400), "'num_hidden_layers' is 1000"),
    "layers 10^9": (changed(CONFIG, num_hidden_layers=10**9), "accepted: .* from 1 to 4096"),
    "positions": (changed(CONFIG, max_position_embeddings=-1), "'max_position_embeddings' is -1"),
    "vocabulary": (changed(CONFIG, vocab_size=10**30), "cannot be loaded"),
    "the usual length": (changed("tokenizer_config.json", model_max_length=10**30), ""),
    "dtype": (changed(CONFIG, dtype="x"), "AttributeError.*'x'"),
    "model_type": (changed(CONFIG, model_type="surprise"), "surprise"),
    "model_type a list": (changed(CONFIG, model_type=["llama"]), "cannot be loaded"),
    "architectures 5": (changed(CONFIG, architectures=5), ""),
    "generation null": (rewritten(GENERATION, b"null"), r"generation_config\.json is None"),
    "generation cut": (cut(GENERATION, 9), r"generation_config\.json.*not valid JSON"),
    "eos text": (changed(GENERATION, eos_token_id="x"), "eos_token_id .* is 'x'"),
    "eos object": (changed(GENERATION, eos_token_id={}), "eos_token_id"),
    "no weights": (without("model.safetensors"), "model.safetensors"),
    "weights cut": (cut("model.safetensors", 5000), "cannot be loaded"),
    "weights empty": (rewritten("model.safetensors", b""), "cannot be loaded"),
    "weights' shape": (weights(of=lambda t: t[:1].clone()), "cannot be loaded"),
    "a weight less": (without_weight("model.norm.weight"), "lack the weight model.norm.weight$"),
    "a layer more": (
        changed(CONFIG, num_hidden_layers=6),
        r"lack the weight model\.layers\.5\.input.* 8",
    ),
    "adapter null": (rewritten("adapter_config.json", b"null"), r"adapter_config\.json is None"),
    "index null": (sharded(None), r"index\.json is None"),
    "index empty": (sharded({}), "cannot be loaded"),
    "index of numbers": (sharded({"metadata": {}, "weight_map": {"a": 5}}), "cannot be loaded"),
    "no shard": (sharded({"metadata": {}, "weight_map": {"a": "b.safetensors"}}), "b.safetensors"),
    "no tokenizer": (without(TOKENIZER), "tokenizer of .* cannot be loaded"),
    "tokenizer cut": (cut(TOKENIZER, 999), "tokenizer of .* cannot be loaded"),
    "tokenizer null": (rewritten(TOKENIZER, b"null"), "tokenizer of .* cannot be loaded"),
    "tokenizer no BPE": (changed(TOKENIZER, model={"type": "X"}), "tokenizer of .* cannot be"),
    "settings null": (rewritten("tokenizer_config.json", b"null"), r"tokenizer_config\.json is"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder(name: str, tmp_path: Path) -> None:
    damage, words = DAMAGES[name]
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    damage(folder)
    try:
        engine = attach(load_model(str(folder)), backend="hf")
        with torch.inference_mode():
            engine.generate([[3, 4]], stop=engine.stopping(2))
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        with pytest.raises(UserError, match=words):
            raise
    else:
        assert not words, "it was to be refused"
