"""Exits that are trained through the shared head: the objective, the start, and training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from training.tiny import tokenizer, write_data, write_model
from transformers import AutoModelForCausalLM

import multirate
from multirate.errors import UserError
from multirate.lab.depth_baselines._shared.linear_exits import LinearExits, start_from_least_squares
from multirate.lab.depth_baselines._shared.multi_exit import MultiExitObjective
from multirate.lab.depth_baselines.deed.modules import AdaptedExits, DeedConfig
from multirate.lab.depth_baselines.deed.spec import DeedObjective
from multirate.lab.depth_baselines.free.spec import FreeConfig, FreeDecodeConfig, FreeObjective
from multirate.lab.depth_baselines.lite.spec import (
    PAPER_THRESHOLDS,
    LiteConfig,
    default_thresholds,
)
from multirate.methods._shared.least_squares import direction
from multirate.methods._shared.teacher import Teacher
from multirate.methods.spec import find
from multirate.runtime.load import load_decoder
from multirate.training.loop import train
from multirate.training.settings import TrainSettings

from .tiny import base, disturb, ids


def both(teacher: Teacher) -> list[tuple[Any, MultiExitObjective]]:
    lite = LinearExits(LiteConfig.for_base(teacher.shape, exits=[1, 3]), teacher.shape)
    deed = AdaptedExits(DeedConfig.for_base(teacher.shape, exits=[1, 3], rank=5), teacher.shape)
    return [(lite, MultiExitObjective(teacher, lite)), (deed, DeedObjective(teacher, deed))]


def some(teacher: Teacher) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = ids(2, 9)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, :4] = False
    return tokens, mask


@torch.no_grad()
def test_untrained_exits_are_the_bases() -> None:
    teacher = Teacher(base())
    tokens, mask = some(teacher)
    for _, objective in both(teacher):
        _, report = objective(tokens, mask)
        terms, exits = objective.early_exit(tokens, mask)
        assert terms == report.terms
        torch.testing.assert_close(report.result.kl, exits.kl, rtol=1e-3, atol=1e-3)
        assert torch.equal(report.result.agree, exits.agree)


@torch.no_grad()
def test_the_loss_is_the_mean_of_kl_alike_or_by_depth() -> None:
    teacher = Teacher(base())
    tokens, mask = some(teacher)
    for (module, objective), weights in zip(both(teacher), ((0.5, 0.5), (0.25, 0.75)), strict=True):
        disturb(module)
        loss, _ = objective(tokens, mask)
        slow = teacher.slow(tokens, shared=0, gates=(1, 3))
        wanted = teacher.head.logits(slow.normed[mask]).log_softmax(-1)
        total = 0.0
        for exit, weight in zip((1, 3), weights, strict=True):
            said = teacher.head.logits(teacher.norm(module(exit, slow.residual[exit][mask])))
            kl = F.kl_div(said.log_softmax(-1), wanted, log_target=True, reduction="batchmean")
            total += weight * float(kl)
        assert float(loss) == pytest.approx(total, rel=1e-3)


def test_lites_maps_start_from_least_squares() -> None:
    teacher = Teacher(base())
    module = LinearExits(LiteConfig.for_base(teacher.shape, exits=[1, 3]), teacher.shape)
    tokens, mask = some(teacher)
    batches = [
        (ids(4, 12, seed=seed), torch.ones(4, 12, dtype=torch.bool), None) for seed in (1, 2)
    ]
    slow = teacher.slow(tokens, shared=0, gates=(1, 3))
    wanted = direction(slow.final[mask])

    def errors() -> list[float]:
        return [
            float((module(exit, slow.residual[exit][mask]) - wanted).square().mean())
            for exit in (1, 3)
        ]

    with torch.no_grad():
        before = errors()
        start_from_least_squares(teacher, module, batches)
        assert all(now < then for now, then in zip(errors(), before, strict=True))


def test_thresholds_are_the_papers_or_on_the_line_through_them() -> None:
    assert default_thresholds(6) == PAPER_THRESHOLDS
    assert default_thresholds(1) == (0.95,)
    assert default_thresholds(3) == (0.95, 0.9, 0.7)
    model = base()
    decoder, teacher = load_decoder(model, "hf"), Teacher(model)
    exits = LinearExits(LiteConfig.for_base(teacher.shape, exits=[1, 3]), teacher.shape)
    with pytest.raises(UserError, match=r"thresholds has 1 values; accepted: one for each"):
        find("lite").make_step(decoder, exits, {"thresholds": [0.5]})
    with pytest.raises(UserError, match="lite's exits are"):
        LiteConfig.for_base(teacher.shape, exits=[4])


@torch.no_grad()
def test_frees_one_exit_is_taught_the_last_layers_residual_too() -> None:
    teacher = Teacher(base())
    tokens, mask = some(teacher)
    slow = teacher.slow(tokens, shared=0, gates=(2,))
    module = LinearExits(FreeConfig.for_base(teacher.shape, exits=[2]), teacher.shape)
    disturb(module)
    with_it, without = (
        float(objective(teacher, module)(tokens, mask)[0])
        for objective in (FreeObjective, MultiExitObjective)
    )
    said = direction(module(2, slow.residual[2][mask]))
    apart = float((said - direction(slow.final[mask])).square().mean())
    assert with_it - without == pytest.approx(apart, rel=1e-3)


def test_what_free_cannot_use_is_refused() -> None:
    shape = Teacher(base()).shape
    assert FreeConfig.for_base(shape).exits == (1,)
    for exits in ([1, 2], [4], [0], []):
        with pytest.raises(UserError, match="exits"):
            FreeConfig.for_base(shape, exits=exits)
    for threshold in (-0.1, 1.1):
        with pytest.raises(UserError, match=r"threshold.*null or a number from 0 to 1"):
            FreeDecodeConfig(threshold=threshold)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("exits")
    data = write_data(folder / "data.jsonl")
    return write_model(folder / "model", data), data


@pytest.mark.parametrize(
    "name", ["calm-classifier", "deed", "free", "lite", "mixture_of_depths", "specee"]
)
def test_trained_saved_and_loaded(name: str, material: tuple[Path, Path], tmp_path: Path) -> None:
    """Exits come nearer to the model, classifiers tell where; the card says what it is."""
    folder, data = material
    exits = [2] if name == "free" else [1, 2, 3]
    options: dict[str, Any] = {"exits": exits, "draft_vocab": 60}
    if name == "mixture_of_depths":
        exits, options = [4], {"blocks": [1, 3]}
    found = {}
    for steps in (1, 30):
        settings = TrainSettings(
            steps=steps, tokens_per_batch=1024, max_length=64, lr=0.02, warmup_steps=2, log_every=30
        )
        found[steps] = train(folder, [data], tmp_path / str(steps), name, settings, options).results
    first, last = (found[steps]["terms"] for steps in (1, 30))
    assert [term["gate"] for term in last] == exits
    if name in ("calm-classifier", "specee"):
        assert max(term["arla"]["auc"] for term in last) > 0.6
    elif name != "mixture_of_depths":
        assert sum(term["kl"] for term in last) < sum(term["kl"] for term in first)
        assert "early_exit" in found[30]
    assert "simulated_tokens_per_step" not in found[30]
    card = (tmp_path / "30" / "README.md").read_text()
    assert "lossy" in card and "tokens per step" not in card
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = multirate.attach(model, tmp_path / "30", backend="hf", tokenizer=tokenizer())
    prompt = tokenizer()("<|user|>abcd<|end|>\n<|assistant|>")["input_ids"]
    plain = engine.generate([prompt], method="autoregressive", stop=engine.stopping(12))
    never = engine.generate([prompt], mode="dynamic", quality=1, stop=engine.stopping(12))
    assert never.sequences == plain.sequences
    early = engine.generate([prompt], stop=engine.stopping(12))
    assert not engine.lossless(name) and sum(early.stats.exits.values()) > 0
