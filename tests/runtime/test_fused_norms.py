"""Norms that run as one kernel in captured passes: which they are, and that they say the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from multirate.runtime.cuda.fused_norms import FusedNorms

from .tiny_models import NAMES, prompts, tiny_model


@pytest.mark.parametrize("name", NAMES)
def test_logits_stay(name: str) -> None:
    model = tiny_model(name)
    (ids,) = prompts(9)
    with torch.no_grad():
        expected = model(ids[None]).logits
        with FusedNorms(model).active():
            got = model(ids[None]).logits
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "norms_of_a_layer"), [("llama", 2), ("qwen3", 4)])
def test_all_norms_of_a_llama_are_found(name: str, norms_of_a_layer: int) -> None:
    model = tiny_model(name)
    layers = model.config.num_hidden_layers
    assert len(FusedNorms(model).epsilons) == norms_of_a_layer * layers + 1


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_norms_of_another_kind_stay(name: str) -> None:
    """Gemma multiplies by 1 + weight; GPT-2 subtracts the mean."""
    assert not FusedNorms(tiny_model(name)).epsilons


def test_nothing_is_left_behind() -> None:
    model = tiny_model("llama")
    norms = FusedNorms(model)
    with pytest.raises(ZeroDivisionError), norms.active(), norms.active():
        raise ZeroDivisionError
    assert all("forward" not in vars(module) for module in model.modules())


def test_hooks_run() -> None:
    model = tiny_model("llama")
    norms = FusedNorms(model)
    module = next(iter(norms.epsilons))
    seen: list[nn.Module] = []
    hook = module.register_forward_pre_hook(lambda norm, _: seen.append(norm))
    with norms.active():
        module(torch.ones(1, len(module.weight)))
    hook.remove()  # other tests share the model
    assert seen == [module]
