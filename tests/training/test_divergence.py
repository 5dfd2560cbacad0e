"""A training whose numbers are no longer finite ends, says so and saves nothing of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from multirate.cli.main import app
from multirate.errors import Diverged, UserError
from multirate.methods.spec import trainable
from multirate.training import loop
from multirate.training.divergence import not_finite
from multirate.training.loop import train
from multirate.training.settings import TrainSettings
from multirate.training.state import STATE, load_state, save_state

NAN = float("nan")


def settings(**changes: Any) -> TrainSettings:
    values: dict[str, Any] = {
        "steps": 6,
        "tokens_per_batch": 128,
        "max_length": 64,
        "warmup_steps": 1,
        "heldout_samples": 4,
        "precision": "fp32",
    }
    return TrainSettings(**{**values, **changes})


def ruin(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Weights become NaN after step `at`, as a rate that is too high makes them."""
    advance = loop.TrainProgress.advance
    clip = nn.utils.clip_grad_norm_
    ruined: list[Any] = []

    def clipping(parameters: Any, most: float) -> torch.Tensor:
        ruined[:] = list(parameters)
        return clip(ruined, most)

    def advancing(self: loop.TrainProgress, step: int, tokens: int) -> None:
        advance(self, step, tokens)
        if step == at:
            for parameter in ruined:
                parameter.data.fill_(NAN)

    monkeypatch.setattr(loop.nn.utils, "clip_grad_norm_", clipping)
    monkeypatch.setattr(loop.TrainProgress, "advance", advancing)


@pytest.mark.parametrize("method", [name for name in trainable() if name != "m2r2-experts"])
def test_every_method_stops_and_saves_nothing(
    tmp_path: Path, model_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    ruin(monkeypatch, at=1)
    with pytest.raises(Diverged, match=r"step 2.*lr is 0.004.*nothing was saved"):
        train(model_dir, [data], tmp_path, method, settings())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("at", [2, 3])  # before another step, and after the last one
def test_the_last_checkpoint_before_it_is_kept(
    tmp_path: Path, model_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    chosen = settings(steps=3, checkpoint_steps=1)
    with monkeypatch.context() as patch:
        ruin(patch, at)
        with pytest.raises(Diverged, match="is kept in"):
            train(model_dir, [data], tmp_path, settings=chosen)
    assert [path.name for path in tmp_path.iterdir()] == [STATE]
    kept = torch.load(tmp_path / STATE, weights_only=True)
    assert kept["step"] == at - 1 and not_finite(kept["stream"]) is None
    assert train(model_dir, [data], tmp_path, settings=chosen).finished


def test_a_lower_rate_goes_on_from_the_last_checkpoint(
    tmp_path: Path, model_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(**changes: Any) -> bool:
        chosen = settings(steps=4, checkpoint_steps=1, **changes)
        return train(model_dir, [data], tmp_path, settings=chosen).finished

    with monkeypatch.context() as patch:
        ruin(patch, 3)
        with pytest.raises(Diverged, match="with a lower lr resumes"):
            run(lr=0.004)
    for refused in ({"lr": 0.01}, {"lr": 0.001, "warmup_steps": 2}):
        with pytest.raises(UserError, match="belongs to a run with another setting"):
            run(**refused)
    assert run(lr=0.001)
    told = json.loads((tmp_path / "accelerator.json").read_text())["training"]
    assert told["settings"]["lr"] == 0.001 and told["steps"] == 4
    assert told["earlier_rates"] == [{"lr": 0.004, "until_step": 2}]


def test_the_command_ends_with_code_1(tmp_path: Path, model_dir: Path, data: Path) -> None:
    arguments = ["--data", str(data), "--out", str(tmp_path / "out"), "--steps", "8"]
    small = ["--tokens-per-batch", "128", "--max-length", "64", "--warmup-steps", "0"]
    result = CliRunner().invoke(
        app, ["train", str(model_dir), *arguments, *small, "--lr", "1e30", "--precision", "fp32"]
    )
    assert result.exit_code == 1, result.output
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: training diverged") and "lr is 1e+30" in last
    assert not list((tmp_path / "out").iterdir())


def test_a_base_that_is_not_finite_is_not_called_a_high_rate(
    tmp_path: Path, model_dir: Path, data: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.model.norm.weight.data.fill_(NAN)
    model.save_pretrained(tmp_path / "model")
    for file in model_dir.glob("token*"):
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    chosen = settings()
    with pytest.raises(Diverged, match="before any weight was changed"):
        train(tmp_path / "model", [data], tmp_path / "out", "kangaroo", chosen)


@pytest.mark.parametrize("where", ["stream", "optimizers"])
def test_a_state_that_is_not_finite_is_refused(tmp_path: Path, where: str) -> None:
    state = {"identity": {}, "step": 1, "tokens": 1, "seconds": 1.0}
    sound: dict[str, Any] = {"stream": {"w": torch.ones(2)}, "optimizers": [{"state": {0: {}}}]}
    save_state(tmp_path, {**state, **sound})
    assert load_state(tmp_path, {}) is not None
    bad = torch.tensor([1.0, NAN])
    sound[where] = {"w": bad} if where == "stream" else [{"state": {0: {"exp_avg": bad}}}]
    save_state(tmp_path, {**state, **sound})
    with pytest.raises(UserError, match=f"{STATE}.*'{where}.*not finite"):
        load_state(tmp_path, {})


def test_a_seed_has_63_bits() -> None:
    assert settings(seed=2**63 - 1).seed == 2**63 - 1
    for seed, accepted in (
        (-1, "0 to 9223372036854775807"),
        (2**63, "63 bits"),
        (10**30, "63 bits"),
    ):
        with pytest.raises(UserError, match=f"seed.*accepted: .*{accepted}"):
            settings(seed=seed)


def test_a_rate_beyond_float32_is_refused() -> None:
    with pytest.raises(UserError, match=r"lr.*at most 1e\+30"):
        settings(lr=1e38)
