"""A model with its experts on disk behind transformers' own `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from experts import tiny
from lab.bench import tiny_model
from transformers import AutoModelForCausalLM

import multirate
from multirate.errors import UserError
from multirate.experts.model import experts_on_disk
from multirate.experts.pack import pack
from multirate.methods._shared.shape import BaseShape
from multirate.methods.m2r2_experts.config import ExpertPredictorConfig
from multirate.methods.m2r2_experts.modules import ExpertPredictor
from multirate.training.checkpoint import Accelerator, describe_base

PROMPT = torch.tensor([[5, 9, 2, 44, 17]])


@pytest.fixture(scope="module", params=["olmoe", "gpt_oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    tiny.save(request.param, path)
    tiny_model.tokenizer().save_pretrained(path)
    pack(path, path / "store")
    return path


def wanted(folder: Path) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    return list(model.generate(PROMPT, max_new_tokens=12, do_sample=False)[0].tolist())


def test_generate_and_custom_generate(folder: Path) -> None:
    model = multirate.offload(folder, folder / "store", memory=8 * record(folder))
    offloaded = experts_on_disk(model)
    assert offloaded is not None
    own = model.generate(PROMPT, max_new_tokens=12, do_sample=False)[0].tolist()
    assert own == wanted(folder)
    assert offloaded.runtime is not None and offloaded.runtime.stats.bytes > 0
    ours = model.generate(
        PROMPT, max_new_tokens=12, do_sample=False, custom_generate=multirate.custom_generate()
    )
    assert ours[0].tolist() == own
    assert offloaded.runtime.memory_bytes == 8 * record(folder), (
        "the budget is the one that was asked for"
    )
    assert offloaded.policy == "aot"
    offloaded.remove()
    assert experts_on_disk(model) is None


def test_a_predictors_folder_is_one_argument(folder: Path, tmp_path: Path) -> None:
    model = multirate.offload(folder, folder / "store", memory=8 * record(folder))
    offloaded = experts_on_disk(model)
    assert offloaded is not None
    shape = BaseShape.of(model.config)
    config = ExpertPredictorConfig.for_base(shape, rank=8)
    Accelerator(
        "m2r2-experts", config, ExpertPredictor(config, shape), describe_base(model)
    ).save_pretrained(tmp_path)
    ours = model.generate(
        PROMPT,
        max_new_tokens=12,
        do_sample=False,
        custom_generate=str(tmp_path),
        trust_remote_code=True,
    )
    assert ours[0].tolist() == wanted(folder)
    assert offloaded.trained_predictor is not None
    offloaded.remove()


def test_bad_input(folder: Path) -> None:
    with pytest.raises(UserError, match="at least"):
        multirate.offload(folder, folder / "store", memory=1)
    with pytest.raises(UserError, match="accepted"):
        multirate.offload(folder, folder / "store", policy="magic")
    whole = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(UserError, match="folder or hub id"):
        multirate.attach(whole, experts=folder / "store")


def record(folder: Path) -> int:
    from multirate.experts.store import ExpertStore

    return ExpertStore.open(folder / "store").index.record.bytes
