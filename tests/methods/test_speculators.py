"""EAGLE-3 checkpoints in the layout of vLLM's `speculators`: written, read, refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.test_cli import run
from safetensors.torch import load_file, save_file
from training.tiny import write_data, write_model

import multirate
from multirate.errors import UserError
from multirate.methods import spec
from multirate.methods._shared.shape import BaseShape
from multirate.training.checkpoint import Accelerator, describe_base

from .test_eagle import CHAIN, layer_of
from .tiny import base


def exported(folder: Path, **options: Any) -> tuple[Any, Any]:
    """A base, and a layer for it whose checkpoint is in `folder`."""
    model = base()
    layer = layer_of("eagle3", BaseShape.of(model.config), draft_vocab=20, **options)
    layer.draft_tokens.copy_(torch.arange(20) * 3)
    config = layer.config
    made = Accelerator("eagle3", config, layer, {**describe_base(model), "name": "tiny"})
    made.export(folder)
    return model, layer.bfloat16()


@pytest.mark.parametrize("before", [False, True])
def test_what_is_written_is_read_and_drafts(tmp_path: Path, before: bool) -> None:
    model, layer = exported(tmp_path, norm_before_residual=before)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["transformer_layer_config"]["hidden_size"] == 32
    tensors = load_file(tmp_path / "model.safetensors")
    assert (tensors["d2t"] + torch.arange(20)).tolist() == layer.draft_tokens.tolist()
    assert tensors["t2d"].sum() == 20 and tensors["t2d"][layer.draft_tokens].all()
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (32, 64)
    loaded = Accelerator.from_pretrained(tmp_path, model)
    assert loaded.config == layer.config.from_json(layer.config.to_json() | {"unroll_steps": 1})
    for name, tensor in layer.state_dict().items():
        assert torch.equal(
            loaded.module.state_dict()[name], tensor.to(loaded.module.state_dict()[name].dtype)
        ), name
    engine = multirate.attach(model, tmp_path, backend="hf")
    name = spec.write_variant("eagle3", CHAIN)
    prompt = [[5, 9, 2, 44, 17]]
    out = engine.generate(prompt, stop=engine.stopping(12), method=name, speculate="always")
    plain = engine.generate(prompt, stop=engine.stopping(12), method="autoregressive")
    assert out.sequences == plain.sequences and out.stats.drafted > 0


def test_rows_of_the_head_may_be_in_any_order_and_layers_be_called_midlayer(tmp_path: Path) -> None:
    model, layer = exported(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    ids = (tensors["d2t"] + torch.arange(20))[order]
    tensors |= {"d2t": ids - torch.arange(20), "lm_head.weight": tensors["lm_head.weight"][order]}
    tensors["embed_tokens.weight"] = model.get_input_embeddings().weight.detach().bfloat16()
    renamed = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    save_file({name: t.contiguous() for name, t in renamed.items()}, path)
    loaded = Accelerator.from_pretrained(tmp_path, model, torch.bfloat16)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(loaded.module.state_dict()[name], tensor), name


def config_with(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name, value in changes.items():
            inside = name in config["transformer_layer_config"] or name == "rope_scaling"
            where = config["transformer_layer_config"] if inside else config
            where[name] = value
            if value is None and not inside:
                del where[name]

    return change


def tensor_with(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors[name] = value
        if value is None:
            del tensors[name]

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (config_with(draft_vocab_size=None), r"config\.json: field 'draft_vocab_size' is missing"),
        (config_with(transformer_layer_config=None), "'transformer_layer_config' is missing"),
        (config_with(transformer_layer_config=3), "'transformer_layer_config' is 3; accepted: an"),
        (config_with(hidden_size=64), r"layer_config\.hidden_size' is 64; .*base model's 32"),
        (config_with(vocab_size=99), r"layer_config\.vocab_size' is 99; .*base model's 61"),
        (config_with(hidden_size=None), r"'transformer_layer_config\.hidden_size' is missing"),
        (config_with(num_hidden_layers=2), r"num_hidden_layers' is 2; accepted: 1"),
        (config_with(rope_scaling={"factor": 8}), r"rope_scaling' is .*; accepted: null"),
        (config_with(rope_theta="far"), "'rope_theta' is 'far'; accepted: a number"),
        (
            config_with(num_attention_heads="two"),
            r"config\.json: .*'heads' is 'two'",
        ),
        (config_with(num_attention_heads=3), "'kv_heads' is 2; accepted: a divisor of heads"),
        (config_with(eagle_aux_hidden_state_layer_ids=[1, 2, 40]), "'taps' .*4 layers"),
        (config_with(speculators_model_type="eagle"), "no field 'speculators_model_type' of eagle"),
        (config_with(norm_before_fc=True), "field 'norm_before_fc' is True; accepted: no such"),
        (config_with(fc_norm="rms"), "field 'fc_norm' is 'rms'"),
        (config_with(model_type="qwen3"), "model_type' is 'qwen3'; accepted: \"llama\""),
        (config_with(sliding_window=128), "sliding_window' is 128"),
        (config_with(rope_parameters={"rope_type": "default", "factor": 2}), "rope_parameters"),
        (config_with(rms_norm_eps=10**400), "norm_eps' is 1000"),
        (tensor_with("fc.bias", torch.ones(32)), "tensor 'fc.bias' does not belong"),
        (tensor_with("layers.1.input_layernorm.weight", torch.ones(32)), r"'layers\.1\.input"),
        (tensor_with("norm.weight", torch.full((32,), torch.inf)), "norm.weight' .* not finite"),
        (tensor_with("fc.weight", None), r"model\.safetensors: tensor 'fc.weight' is missing"),
        (tensor_with("d2t", None), "tensor 'd2t' is missing"),
        (tensor_with("d2t", torch.zeros(2, 10)), "'d2t' must map 20 rows"),
        (tensor_with("d2t", torch.full((20,), 60)), "'d2t' must map 20 rows to different"),
        (tensor_with("t2d", torch.ones(61, dtype=torch.bool)), "'t2d' marks other ids"),
        (tensor_with("t2d", torch.tensor(1)), "'t2d' marks other ids"),
        (tensor_with("norm.weight", torch.ones(5)), r"'norm.weight' has shape \(5,\)"),
        (tensor_with("embed_tokens.weight", torch.zeros(61, 32)), "'embed_tokens.weight' differs"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path,
    change: Callable[[dict[str, Any], dict[str, Any]], None],
    message: str,
) -> None:
    model, _ = exported(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    change(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        Accelerator.from_pretrained(tmp_path, model)


def test_what_changes_nothing_is_taken(tmp_path: Path) -> None:
    """Fields that are off, what every config has, and tensors that only training reads."""
    model, _ = exported(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config |= {"norm_before_fc": False, "fc_norm": None, "transformers_version": "4.57.0"}
    config["transformer_layer_config"] |= {"max_position_embeddings": 64, "sliding_window": None}
    path.write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["verifier_lm_head.weight"] = torch.ones(61, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert Accelerator.from_pretrained(tmp_path, model).method == "eagle3"


def test_on_the_command_line(tmp_path: Path) -> None:
    """Trained, exported, used; a checkpoint that does not fit ends with code 2 and one sentence."""
    data = write_data(tmp_path / "chat.jsonl")
    model = write_model(tmp_path / "model", data, steps=2)
    own, other = tmp_path / "own", tmp_path / "other"
    done = run(
        *("train", str(model), "--method", "eagle3", "--data", str(data), "--out", str(own)),
        *("--steps", "2", "--max-length", "64", "--tokens-per-batch", "256"),
    )
    assert done.exit_code == 0, done.output
    done = run("export", str(model), "-a", str(own), "--out", str(other))
    assert done.exit_code == 0 and (other / "config.json").exists(), done.output
    done = run("generate", str(model), "-a", str(other), "-p", "a", "-n", "4")
    assert done.exit_code == 0, done.output
    config = json.loads((other / "config.json").read_text())
    del config["draft_vocab_size"]
    (other / "config.json").write_text(json.dumps(config))
    done = run("generate", str(model), "-a", str(other), "-p", "a", "-n", "4")
    assert done.exit_code == 2 and "field 'draft_vocab_size' is missing" in done.output
