"""`multirate inspect` as users call it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from lab.bench import tiny_model

from multirate.loading.hub import load_model
from multirate.methods._shared.shape import BaseShape
from multirate.methods.spec import find_training
from multirate.training.checkpoint import Accelerator, describe_base

from .test_cli import refused, run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model.save(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def accelerator(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    network, kind = load_model(model, "float32").model, find_training("m2r2-carry")
    shape = BaseShape.of(network.config)
    config = kind.config_for(shape, rank=4)
    made = Accelerator("m2r2-carry", config, kind.build(config, shape), describe_base(network))
    folder = tmp_path_factory.mktemp("accelerator")
    made.save_pretrained(folder)
    return str(folder)


def test_a_page_of_a_model_and_an_accelerator(model: str, accelerator: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "page.html"
    done = run("inspect", model, "-a", accelerator, "-p", "hi", "-n", "9", "--out", str(out))
    assert done.exit_code == 0, (done.output, done.exception)
    assert done.stdout == f"{out}\n"
    page = out.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and page.count('role="button"') == 9
    assert "Source of each token" in page and "confidence" in page
    assert Path(accelerator).name in page and "versions" in page and "transformers" in page
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_prompts_of_a_file(model: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data, out = tmp_path / "data.jsonl", tmp_path / "page.html"
    records = [{"instruction": f"question {i}", "output": "x"} for i in range(5)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = ["inspect", model, "--data", str(data), "-n", "6", "--out", str(out)]
    done = run(*given, "--limit", "3")
    assert done.exit_code == 0, (done.output, done.exception)
    assert out.read_text(encoding="utf-8").count('class="answer"') == 3


def test_what_of_the_models_own_config_is_left_out_is_said(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder, out = tiny_model.save(tmp_path / "model"), tmp_path / "page.html"
    given = ["inspect", str(folder), "-p", "hi", "-n", "3", "--out", str(out)]
    assert not run(*given).stderr
    file = folder / "generation_config.json"
    asked = {"repetition_penalty": 1.4, "stop_strings": ["."]}
    file.write_text(json.dumps(json.loads(file.read_text()) | asked))
    assert run(*given).stderr == (
        "note: the model's generation_config asks for repetition_penalty 1.4, stop_strings; "
        "multirate ignores it and decodes the bare model\n"
    )


def test_what_inspect_refuses(model: str, accelerator: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "page.html"
    given = ["inspect", model, "--out", str(out)]
    refused(run("inspect", model), "--out is missing")
    refused(run("inspect", model, "--out", str(tmp_path / "no" / "page.html")), "cannot write")
    refused(run("inspect", model, "--out", str(tmp_path)), "it is a folder")
    refused(run("inspect", str(tmp_path / "none"), "--out", str(out)), "there is no folder")
    refused(run(*given, "-p", "  "), "--prompt is empty")
    refused(run(*given, "-p", "hi", "--data", "x.jsonl"), "either --prompt or --data")
    refused(run(*given, "--data", str(tmp_path / "x.jsonl")), "x.jsonl")
    refused(run(*given, "-p", "x" * 600), "512")
    refused(run(*given, "--quality", "0.9"), "quality needs an accelerator")
    refused(run(*given, "-a", accelerator, "--quality", "1.5"), "quality is 1.5")
    refused(run(*given, "-a", accelerator, "--quality", "0.9"), "no calibration is stored")
    refused(run(*given, "-a", str(tmp_path)), "is not an accelerator")
    refused(run("inspect", "tiny", "-a", accelerator, "--out", str(out)), "does not fit")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_without_what_draws_it(
    model: str, tmp_path: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "jinja2":
        pytest.importorskip("matplotlib")
    monkeypatch.setitem(sys.modules, missing, None)
    out = tmp_path / "page.html"
    refused(run("inspect", model, "--out", str(out)), missing, "pip install 'multirate[inspect]'")
    assert not out.exists()
