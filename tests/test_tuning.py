"""tune.py, a recipe, on a model of two layers: LayerSkip's loss and layer dropout, and LoRA."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from script_file import load_script
from transformers import LlamaConfig, LlamaForCausalLM

from multirate.training.data import Batch


@pytest.fixture(scope="module")
def tune() -> ModuleType:
    return load_script("lab/recipes/tasks/tune.py")


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


IDS = torch.arange(24).reshape(2, 12)


def test_a_layer_that_is_left_out_passes_its_residual_on(tune: ModuleType, model: Any) -> None:
    after_one = model.model(input_ids=IDS, output_hidden_states=True).hidden_states[1]
    tune.drop_layers(model.model.layers, 1.0)  # the first never, the last always
    left = model.model(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(left, model.model.norm(after_one))


def test_layers_are_left_out_as_often_as_their_depth_says(tune: ModuleType, model: Any) -> None:
    whole = model.model(input_ids=IDS).last_hidden_state
    tune.drop_layers(model.model.layers, 0.3)
    torch.manual_seed(0)
    left_out = sum(
        not torch.equal(model.model(input_ids=IDS).last_hidden_state, whole) for _ in range(300)
    )
    assert 60 < left_out < 120


def test_the_head_reads_the_exit_too(tune: ModuleType, model: Any) -> None:
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[:, 5:10] = True
    batch = Batch(IDS, mask)
    hidden = model.model(input_ids=IDS, output_hidden_states=True)
    following = torch.roll(IDS, -1, 1)[mask]
    end = F.cross_entropy(model.lm_head(hidden.last_hidden_state[mask]), following)
    early = F.cross_entropy(
        model.lm_head(model.model.norm(hidden.hidden_states[1])[mask]), following
    )
    torch.testing.assert_close(tune.answer_loss(model, batch), end)
    torch.testing.assert_close(tune.answer_loss(model, batch, 1), (end + early) / 2)
    assert not torch.isclose(end, early)


def test_low_rank_changes_are_learned_beside_the_weights_and_merged(
    tune: ModuleType, model: Any
) -> None:
    model.requires_grad_(False)
    layers = model.model.layers
    names = set(model.state_dict())
    before = {name: x.clone() for name, x in model.state_dict().items()}
    said = model(IDS).logits
    parameters = tune.add_low_rank(layers, 3)
    assert len(parameters) == 2 * 7 * len(layers)
    torch.testing.assert_close(model(IDS).logits, said)

    batch = Batch(IDS, torch.ones_like(IDS, dtype=torch.bool))
    optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0)
    losses = []
    for _ in range(5):
        loss = tune.answer_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]

    learned = model(IDS).logits
    tune.merge_low_rank(layers)
    assert set(model.state_dict()) == names
    torch.testing.assert_close(model(IDS).logits, learned)
    for name, x in model.state_dict().items():
        changed = x - before[name]
        if name.startswith("model.layers") and "_proj" in name:
            assert 0 < torch.linalg.matrix_rank(changed, rtol=1e-4) <= 3
        else:
            assert not changed.any()
