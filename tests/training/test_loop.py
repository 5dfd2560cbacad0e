"""Training runs: they learn, resume to the same weights, run in two processes, and refuse early."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from multirate.errors import UserError
from multirate.io import held
from multirate.training import loop
from multirate.training.checkpoint import Accelerator
from multirate.training.loop import train
from multirate.training.prompt_fingerprints import read_fingerprints
from multirate.training.settings import TrainSettings
from multirate.training.state import STATE

OPTIONS = {"rank": 8, "arla_dim": 8}


def settings(**changes: Any) -> TrainSettings:
    values: dict[str, Any] = {
        "steps": 12,
        "tokens_per_batch": 512,
        "max_length": 64,
        "warmup_steps": 3,
        "log_every": 5,
        "heldout_samples": 12,
        "precision": "fp32",
        "seed": 1,
    }
    return TrainSettings(**{**values, **changes})


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "accelerator.safetensors")


@pytest.mark.parametrize("method", ["m2r2-carry", "m2r2", "kangaroo"])
def test_training_beats_the_early_exit(
    tmp_path: Path, model_dir: Path, data: Path, method: str
) -> None:
    options = (
        {} if method == "kangaroo" else {**OPTIONS, "gates": [1, 2] if method == "m2r2" else [1]}
    )
    result = train(
        model_dir,
        [data],
        tmp_path,
        method,
        settings(steps=40, precision="bf16"),
        options,
    )
    assert result.finished and result.steps == 40
    for term, exit_ in zip(
        result.results["terms"], result.results["early_exit"]["terms"], strict=False
    ):
        assert term["kl"] < 0.8 * exit_["kl"]
        assert term["agreement"] > exit_["agreement"]
    assert (
        result.results["simulated_tokens_per_step"]
        > result.results["early_exit"]["simulated_tokens_per_step"]
    )
    loaded = Accelerator.from_pretrained(tmp_path, AutoModelForCausalLM.from_pretrained(model_dir))
    assert loaded.results == result.results and loaded.training["data"] == ["chat.jsonl"]
    text = (tmp_path / "accelerator.json").read_text() + (tmp_path / "README.md").read_text()
    assert str(model_dir.parent) not in text and str(data.parent) not in text
    assert not (tmp_path / STATE).exists()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ctrl_c_then_resume_gives_the_uninterrupted_weights(
    tmp_path: Path, model_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    s = settings(gradient_accumulation=2, precision=precision)
    train(model_dir, [data], tmp_path / "whole", settings=s, options=OPTIONS)
    advance = loop.TrainProgress.advance

    def interrupting(self: loop.TrainProgress, step: int, tokens: int) -> None:
        advance(self, step, tokens)
        if step == 6:  # the request is honoured at the end of the step that follows
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(loop.TrainProgress, "advance", interrupting)
        first = train(model_dir, [data], tmp_path / "parts", settings=s, options=OPTIONS)
    assert not first.finished and first.steps == 7 and (tmp_path / "parts" / STATE).exists()
    assert not (tmp_path / "parts" / "accelerator.json").exists()
    with pytest.raises(UserError, match="setting lr"):
        train(
            model_dir,
            [data],
            tmp_path / "parts",
            settings=settings(lr=0.1, precision=precision, gradient_accumulation=2),
            options=OPTIONS,
        )
    assert train(model_dir, [data], tmp_path / "parts", settings=s, options=OPTIONS).steps == 12
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    for name in whole:
        assert torch.equal(whole[name], parts[name]), name


def test_held_out_files_count_each_new_prompt_once(
    tmp_path: Path, model_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = json.loads(data.read_text().splitlines()[0])["instruction"]
    heldout = tmp_path / "heldout.jsonl"
    asked = [seen.upper() + " ", "zz yy", "ZZ  yy", "zz yy", "ww"]
    heldout.write_text(
        "".join(json.dumps({"instruction": q, "output": "abcdefgh"}) + "\n" for q in asked)
    )
    out = tmp_path / "out"
    results = train(
        model_dir,
        [data],
        out,
        settings=settings(steps=1, heldout_files=(str(heldout),)),
        options=OPTIONS,
    ).results
    assert "skipping 1 of 5 held-out samples" in capsys.readouterr().err
    assert results["prompts"] == 2 and results["rows"] == 2 * len("abcdefgh") + 2
    assert "answers to 2 prompts" in (out / "README.md").read_text()


def test_a_damaged_state_is_refused(tmp_path: Path, model_dir: Path, data: Path) -> None:
    (tmp_path / STATE).write_bytes(b"PK half a file")
    with pytest.raises(UserError, match=r"truncated or damaged.*delete"):
        train(model_dir, [data], tmp_path, settings=settings(), options=OPTIONS)


def test_a_finished_accelerator_is_not_replaced_unasked(
    tmp_path: Path, model_dir: Path, data: Path
) -> None:
    train(model_dir, [data], tmp_path, settings=settings(steps=1), options=OPTIONS)
    with pytest.raises(UserError, match="already holds a finished accelerator"):
        train(model_dir, [data], tmp_path, settings=settings(steps=1), options=OPTIONS)
    assert train(
        model_dir, [data], tmp_path, settings=settings(steps=1, overwrite=True), options=OPTIONS
    ).finished


def test_an_accelerator_that_finds_no_room_is_saved_by_the_same_call(
    tmp_path: Path, model_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def full(made: str, place: Path) -> None:
        if place.name == "accelerator.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(made, place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(UserError, match="no space left"):
            train(model_dir, [data], tmp_path, settings=settings(steps=1), options=OPTIONS)
    assert train(model_dir, [data], tmp_path, settings=settings(steps=1), options=OPTIONS).finished
    assert not (tmp_path / STATE).exists()


def test_a_folder_that_another_training_writes_is_refused(
    tmp_path: Path, model_dir: Path, data: Path
) -> None:
    with held(tmp_path), pytest.raises(UserError, match="written by another process"):
        train(model_dir, [data], tmp_path, settings=settings(steps=1), options=OPTIONS)
    assert not list(tmp_path.iterdir())


def test_reduced_head_takes_the_frequent_tokens(
    tmp_path: Path, model_dir: Path, data: Path
) -> None:
    train(
        model_dir,
        [data],
        tmp_path,
        settings=settings(steps=2),
        options={**OPTIONS, "draft_vocab": 11},
    )
    chosen = weights(tmp_path)["draft_tokens"].tolist()
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    from .tiny import LETTERS, tokenizer

    assert sorted(chosen) == sorted([3, *(tokenizer().convert_tokens_to_ids(c) for c in LETTERS)])
    assert Accelerator.from_pretrained(tmp_path, model).module.draft_tokens.tolist() == chosen


def test_a_trained_head_keeps_the_rows_of_tokens_that_stay(
    tmp_path: Path, model_dir: Path, data: Path
) -> None:
    first, other, method = tmp_path / "first", tmp_path / "other", "eagle3"
    train(model_dir, [data], first, method, settings(steps=5, lr=0.02), {"draft_vocab": 64})
    still = settings(steps=1, lr=1e-12, start_from=str(first))
    train(model_dir, [data], other, method, still, {"draft_vocab": 32})
    began, ended = weights(first), weights(other)
    places = torch.isin(began["draft_tokens"], ended["draft_tokens"])
    assert ended["head.weight"].shape[0] == 32 and int(places.sum()) == 32
    assert torch.equal(ended["head.weight"], began["head.weight"][places])


def test_a_run_goes_on_from_a_trained_accelerator(
    tmp_path: Path, model_dir: Path, data: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    chosen = {**OPTIONS, "draft_vocab": 64, "unroll_steps": 1}
    train(model_dir, [data], first, "m2r2-carry", settings(steps=40, lr=0.02), chosen)
    # a rate of nothing: what is saved is what the run began with
    still = settings(steps=1, lr=1e-12, start_from=str(first))
    result = train(model_dir, [data], second, "m2r2-carry", still, {"unroll_steps": 2})
    began, ended = weights(first), weights(second)
    assert began.keys() == ended.keys()
    assert all(torch.equal(began[name], ended[name]) for name in began)
    description = json.loads((second / "accelerator.json").read_text())
    assert description["config"]["unroll_steps"] == 2
    assert [run["steps"] for run in description["training"]["before"]] == [40]
    assert len(result.results["terms"]) == 2
    card = (second / "README.md").read_text()
    tokens = sum(
        run["tokens"] for run in [*description["training"]["before"], description["training"]]
    )
    assert f"2 runs, each starting from the one before: {tokens:,} tokens in 41 steps." in card
    known = [
        read_fingerprints(folder, json.loads((folder / "accelerator.json").read_text()))
        for folder in (first, second)
    ]
    assert known[0] and known[0] == known[1]

    # the head's rows are the base's: others may be chosen, all that was trained stays
    other = tmp_path / "other"
    train(model_dir, [data], other, "m2r2-carry", still, {"draft_vocab": 32})
    chosen_anew = weights(other)
    assert len(chosen_anew["draft_tokens"]) == 32
    assert set(chosen_anew["draft_tokens"].tolist()) < set(began["draft_tokens"].tolist())
    assert torch.equal(chosen_anew["carry.proj.weight"], began["carry.proj.weight"])

    # inner residuals may be read from now on: their matrix starts at zero
    tapped = tmp_path / "tapped"
    train(model_dir, [data], tapped, "m2r2-carry", still, {"taps": [2, 3]})
    with_taps = weights(tapped)
    assert all(torch.equal(began[name], with_taps[name]) for name in began)
    assert with_taps.keys() - began.keys() == {"features.proj.weight", "features.sizes"}
    assert with_taps["features.proj.weight"].abs().max() < 1e-9
    assert len(with_taps["features.sizes"].unique()) > 1

    for options, method, word in (
        ({"rank": 4}, "m2r2-carry", "adapters.0.*leave out options"),
        ({"taps": [1]}, "m2r2-carry", "'taps' is .*above the last gate"),
        ({"taps": [9]}, "m2r2-carry", "'taps' is .*layers below the base model's 4"),
        ({}, "kangaroo", "--method m2r2-carry"),
    ):
        with pytest.raises(UserError, match=word):
            train(model_dir, [data], tmp_path / "third", method, still, options)


def test_refusals_come_before_work(tmp_path: Path, model_dir: Path, data: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"output folder .*file"):
        train("no/such/model", [data], tmp_path / "file", settings=settings())
    with pytest.raises(UserError, match="no_such_method"):
        train(model_dir, [data], tmp_path / "out", "no_such_method", settings())
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="it has no config"):
        train(tmp_path, [data], tmp_path / "out", settings=settings())
    with pytest.raises(UserError, match="gates"):
        train(model_dir, [data], tmp_path / "out", settings=settings(), options={"gates": [9]})


SCRIPT = """
import sys
from multirate.training.loop import train
from multirate.training.settings import TrainSettings
model, data, out = sys.argv[1:]
settings = TrainSettings(
    steps=4, tokens_per_batch=256, max_length=64, warmup_steps=2, seed=1,
    precision="fp32", heldout_samples=12,
)
train(model, [data], out, settings=settings, options={"rank": 8, "arla_dim": 8})
"""


def test_two_processes_equal_one_with_accumulation(
    tmp_path: Path, model_dir: Path, data: Path
) -> None:
    """Two processes take the batches that one process takes as two micro-batches, so the weights
    agree.
    """
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--main_process_port",
        "0",
        str(script),
        str(model_dir),
        str(data),
        str(tmp_path / "two"),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    train(
        model_dir,
        [data],
        tmp_path / "one",
        settings=settings(
            steps=4,
            tokens_per_batch=256,
            warmup_steps=2,
            gradient_accumulation=2,
        ),
        options=OPTIONS,
    )
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(
            one[name], two[name], atol=1e-4, rtol=1e-2, msg=lambda m, n=name: f"{n}: {m}"
        )
    import json

    described = [
        json.loads((tmp_path / n / "accelerator.json").read_text()) for n in ("one", "two")
    ]
    assert described[1]["training"]["processes"] == 2
    assert described[0]["results"]["rows"] == described[1]["results"]["rows"]
    assert described[0]["training"]["tokens"] == described[1]["training"]["tokens"]
