"""An accelerator on disk: what is saved comes back; whatever does not fit is refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from multirate.errors import UserError
from multirate.methods.common.shape import BaseShape
from multirate.methods.spec import find_training
from multirate.training.checkpoint import Accelerator, describe_base
from multirate.training.fingerprint import fingerprint


def small(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
                                 num_attention_heads=2, num_key_value_heads=1)
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changes}))


def accelerator(model: Any, method: str = "m2r2-carry", **options: Any) -> Accelerator:
    made = find_training(method)
    shape = BaseShape.of(model.config)
    config = made.config_for(shape, **options)
    module = made.build(config, shape)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_()
    return Accelerator(method, config, module, describe_base(model, "tiny"), {"steps": 3}, {})


@pytest.mark.parametrize("method,options", [("m2r2", {}), ("m2r2-carry", {"draft_vocab": 20}), ("kangaroo", {})])
def test_round_trip(tmp_path: Path, method: str, options: dict[str, Any]) -> None:
    model = small()
    made = accelerator(model, method, **options)
    made.save_pretrained(tmp_path / "a" / "b")
    loaded = Accelerator.from_pretrained(tmp_path / "a" / "b", model)
    assert loaded.config == made.config and loaded.method == method and loaded.training == {"steps": 3}
    for name, tensor in made.module.state_dict().items():
        got = loaded.module.state_dict()[name]
        expected = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
        assert torch.equal(got, expected), name
    assert not any(p.requires_grad for p in loaded.module.parameters())
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == [
        "README.md", "accelerator.json", "accelerator.safetensors", "custom_generate"]
    card = (tmp_path / "a" / "b" / "README.md").read_text()
    assert method in card and made.base["fingerprint"] in card
    half = Accelerator.from_pretrained(tmp_path / "a" / "b", small().bfloat16())
    assert next(half.module.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("changes,words", [
    ({"num_hidden_layers": 4}, ["num_layers 4 instead of 3"]),
    ({"hidden_size": 32, "vocab_size": 51}, ["hidden_size 32 instead of 16", "vocab_size 51 instead of 50"]),
    ({"initializer_range": 0.05}, ["other weights", "fingerprint"]),
])
def test_another_base_is_refused(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    accelerator(small()).save_pretrained(tmp_path)
    with pytest.raises(UserError) as caught:
        Accelerator.from_pretrained(tmp_path, small(**changes))
    assert "tiny" in str(caught.value) and all(w in str(caught.value) for w in words), caught.value


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    model = small()
    accelerator(model).save_pretrained(tmp_path)
    weights, description = tmp_path / "accelerator.safetensors", tmp_path / "accelerator.json"
    good_weights, good = weights.read_bytes(), json.loads(description.read_text())

    def refused(match: str) -> None:
        with pytest.raises(UserError, match=match):
            Accelerator.from_pretrained(tmp_path, model)

    weights.write_bytes(good_weights[:-10])
    refused("accelerator.safetensors.*checksum")
    weights.unlink()
    refused("accelerator.safetensors cannot be read")
    weights.write_bytes(good_weights)
    description.write_text(json.dumps(good)[:-20])
    refused("accelerator.json is not valid JSON")
    description.write_text(json.dumps({**good, "method": "medusa"}))
    refused("medusa")
    description.write_text(json.dumps({**good, "format": 9}))
    refused("format.*9")
    description.write_text(json.dumps({**good, "config": {**good["config"], "rank": -1}}))
    refused("rank.*-1")
    description.write_text(json.dumps({**good, "config": {**good["config"], "rank": 8}}))
    refused("tensor 'adapters.0.*shape")
    description.write_text("[]")
    refused("no valid field 'format'")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="not a folder"):
        Accelerator.from_pretrained(tmp_path / "other.safetensors", model)


def test_fingerprint_survives_a_cast_and_sees_every_tensor() -> None:
    model = small()
    first = fingerprint(model)
    assert fingerprint(small()) == first
    assert fingerprint(small().bfloat16()) == first
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.mul_(1.5).add_(0.1)  # a training step moves a whole tensor
        assert fingerprint(model) != first, name
        with torch.no_grad():
            parameter.copy_(dict(small().named_parameters())[name])
    assert fingerprint(model) == first


def test_fingerprint_of_a_saved_model(tmp_path: Path) -> None:
    model = small(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path)) == fingerprint(model)
