"""EAGLE-3 checkpoints in the layout of vLLM's `speculators`: config.json and model.safetensors."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from transformers import PretrainedConfig

from multirate.errors import UserError
from multirate.io import parse_json, write_atomically
from multirate.methods._shared.shape import BaseShape
from multirate.methods.eagle3.config import Eagle3Config
from multirate.methods.eagle3.modules import Eagle3Layer

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_NAMES = {
    "fc.weight": "fc.weight",
    "embedding_norm.weight": "layers.0.input_layernorm.weight",
    "carried_norm.weight": "layers.0.hidden_norm.weight",
    "attn.q.weight": "layers.0.self_attn.q_proj.weight",
    "attn.k.weight": "layers.0.self_attn.k_proj.weight",
    "attn.v.weight": "layers.0.self_attn.v_proj.weight",
    "attn.o.weight": "layers.0.self_attn.o_proj.weight",
    "mlp_norm.weight": "layers.0.post_attention_layernorm.weight",
    "mlp.gate.weight": "layers.0.mlp.gate_proj.weight",
    "mlp.up.weight": "layers.0.mlp.up_proj.weight",
    "mlp.down.weight": "layers.0.mlp.down_proj.weight",
    "norm.weight": "norm.weight",
    "head.weight": "lm_head.weight",
}
"""Ours → theirs; `midlayer.` stands for `layers.0.` in EAGLE's own checkpoints."""
_MORE_TENSORS = {"embed_tokens.weight", "d2t", "t2d"}
_TRAINED_WITH = ("verifier_", "rotary_emb.")
"""Tensors that begin so are the base's, or follow from the config."""
_FIELDS = {
    *("speculators_model_type", "speculators_config", "speculators_version", "auto_map"),
    *("transformer_layer_config", "draft_vocab_size", "target_hidden_size"),
    *("eagle_aux_hidden_state_layer_ids", "norm_before_residual", "embed_requires_grad"),
    *("torch_dtype", "has_no_defaults_at_init"),
}
_LAYER_FIELDS = {
    *("hidden_size", "vocab_size", "num_hidden_layers", "hidden_act", "attention_bias", "mlp_bias"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
    *("rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling", "model_type"),
    *("max_position_embeddings", "initializer_range", "attention_dropout", "pretraining_tp"),
    *("use_cache", "max_window_layers", "layer_types", "torch_dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}
"""Fields that are read below or change nothing that a drafter computes. PretrainedConfig's own come
on top; of any other a value that is not null or false may mean other arithmetic.
"""
_DRAFTED = 5
"""Tokens of a draft that a server is told to begin with."""


def is_published(folder: Path) -> bool:
    path = folder / CONFIG
    if not path.is_file():
        return False
    config = parse_json(path.read_bytes(), path)
    return isinstance(config, dict) and config.get("speculators_model_type") == "eagle3"


def read(
    folder: Path, base: BaseShape, embeddings: Tensor
) -> tuple[Eagle3Config, dict[str, Tensor]]:
    """A checkpoint for the base with these input embeddings [V, d]: its config, and the tensors of
    an Eagle3Layer. Raises UserError naming file and field for what is missing or does not fit.
    """
    path = folder / CONFIG
    config = _config(path, parse_json(path.read_bytes(), path), base)
    path = folder / WEIGHTS
    try:
        tensors = load(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from None
    except (SafetensorError, ValueError, KeyError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}).") from None
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    own = tensors.get("embed_tokens.weight")
    if own is not None and (
        own.shape != embeddings.shape
        or not torch.allclose(own.bfloat16(), embeddings.cpu().bfloat16(), atol=1e-3, rtol=0.02)
    ):
        raise UserError(
            f"{path}: tensor 'embed_tokens.weight' differs from the base model's; accepted: the "
            "base's input embeddings, or none."
        )
    known = {*_NAMES.values(), *_MORE_TENSORS}
    for name in sorted(tensors.keys() - known):
        if not name.removeprefix("layers.0.self_attn.").startswith(_TRAINED_WITH):
            raise UserError(
                f"{path}: tensor '{name}' does not belong to a supported EAGLE-3 drafter; "
                f"accepted: {', '.join(sorted(known))}."
            )
    found = {ours: _tensor(path, tensors, theirs) for ours, theirs in _NAMES.items()}
    found["tap_sizes"] = torch.ones(
        len(config.taps) * base.hidden_size, dtype=torch.float32, device="cpu"
    )
    if config.draft_vocab is not None:
        chosen, order = _draft_tokens(path, tensors, config.draft_vocab, base.vocab_size)
        found["draft_tokens"] = chosen
        if len(found["head.weight"]) == len(order):
            found["head.weight"] = found["head.weight"][order]
    return config, found


def _config(path: Path, given: dict[str, Any], base: BaseShape) -> Eagle3Config:
    def refuse(field: str, value: Any, accepted: str) -> None:
        raise UserError(f"{path}: field '{field}' is {reprlib.repr(value)}; accepted: {accepted}.")

    def field(values: dict[str, Any], name: str, where: str = "") -> Any:
        if values.get(name) is None:
            raise UserError(f"{path}: field '{where}{name}' is missing.")
        return values[name]

    layer = field(given, "transformer_layer_config")
    if not isinstance(layer, dict):
        refuse("transformer_layer_config", layer, "an object")
    inner = "transformer_layer_config."
    usual_fields = PretrainedConfig().to_dict().keys()
    for values, known, where in ((given, _FIELDS, ""), (layer, _LAYER_FIELDS, inner)):
        for name, value in values.items():
            if name not in known | usual_fields and value not in (None, False, [], {}):
                refuse(where + name, value, "no such field (its effect is unknown here)")
    for name, ours in (("hidden_size", base.hidden_size), ("vocab_size", base.vocab_size)):
        value = field(layer, name, inner)
        if value != ours:
            refuse(inner + name, value, f"the base model's {ours}")
    wide = given.get("target_hidden_size")
    if wide not in (None, base.hidden_size):
        refuse("target_hidden_size", wide, f"the base model's {base.hidden_size}")
    for name, usual in (
        ("model_type", "llama"),
        ("num_hidden_layers", 1),
        ("layer_types", ["full_attention"]),
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("rope_scaling", None),
    ):
        if layer.get(name) not in (None, usual):
            refuse(inner + name, layer[name], json.dumps(usual))
    heads = field(layer, "num_attention_heads", inner)
    rope = layer.get("rope_parameters") or {}
    plain = isinstance(rope, dict) and rope.get("rope_type", "default") == "default"
    if not plain or rope.keys() - {"rope_type", "rope_theta"}:
        refuse(inner + "rope_parameters", rope, "rope_type default and rope_theta")
    vocab = field(given, "draft_vocab_size")
    taps = given.get("eagle_aux_hidden_state_layer_ids")
    try:
        config = Eagle3Config.from_json(
            {
                "heads": heads,
                "kv_heads": layer.get("num_key_value_heads", heads),
                "head_dim": layer.get("head_dim") or base.hidden_size // heads,
                "intermediate": field(layer, "intermediate_size", inner),
                "norm_eps": layer.get("rms_norm_eps", 1e-6),
                "rope_theta": rope.get("rope_theta") or layer.get("rope_theta", 10000.0),
                "draft_vocab": None if vocab == base.vocab_size else vocab,
                "taps": taps or (2, base.num_layers // 2, base.num_layers - 3),
                "norm_before_residual": given.get("norm_before_residual", False),
            }
        )
        config.check_base(base)
    except (TypeError, ZeroDivisionError):
        refuse(inner + "num_attention_heads", heads, "a whole number of at least 1")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return config


def _tensor(path: Path, tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise UserError(f"{path}: tensor '{name}' is missing.")
    return tensors[name]


def _draft_tokens(
    path: Path, tensors: dict[str, Tensor], count: int, vocab: int
) -> tuple[Tensor, Tensor]:
    """The ids of the head's rows, increasing, and the rows in that order: d2t says how much is
    added to a row's number.
    """
    offsets = _tensor(path, tensors, "d2t")
    fits = offsets.shape == (count,) and not offsets.is_floating_point()
    ids = (
        offsets.to(torch.int64) + torch.arange(count, device="cpu")
        if fits
        else -torch.ones(1, dtype=torch.int64, device="cpu")
    )
    chosen, order = ids.sort()
    if (chosen.diff() <= 0).any() or int(chosen[0]) < 0 or int(chosen[-1]) >= vocab:
        raise UserError(
            f"{path}: tensor 'd2t' must map {count} rows to different ids below {vocab}."
        )
    marked = tensors.get("t2d")
    if marked is not None and not torch.equal(marked.flatten().nonzero()[:, 0], chosen):
        raise UserError(f"{path}: tensor 't2d' marks other ids than 'd2t' maps to.")
    return chosen, order


def write(folder: Path, layer: Eagle3Layer, base: dict[str, Any]) -> None:
    """The layer as a checkpoint for the model that `base` describes (accelerator.json). The input
    embeddings are the base's, and not among the tensors.
    """
    config, shape = layer.config, layer.base
    tokens = layer.draft_tokens
    chosen = torch.arange(shape.vocab_size, device="cpu") if tokens is None else tokens.cpu()
    state = layer.state_dict()
    tensors = {theirs: state[ours].bfloat16().cpu() for ours, theirs in _NAMES.items()}
    tensors[_NAMES["fc.weight"]] = layer.features().bfloat16().cpu()
    tensors["d2t"] = chosen - torch.arange(len(chosen), device="cpu")
    tensors["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool, device="cpu")
    tensors["t2d"][chosen] = True
    description = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(chosen),
        "norm_before_residual": config.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "torch_dtype": "bfloat16",
        "transformer_layer_config": {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": shape.hidden_size,
            "intermediate_size": config.intermediate,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "vocab_size": shape.vocab_size,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _DRAFTED}],
            "verifier": {
                "name_or_path": base.get("name", ""),
                "architectures": [shape.architecture],
            },
        },
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot create the folder {folder}: {error.strerror}.") from None
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomically(folder / WEIGHTS, save(contiguous, metadata={"format": "pt"}))
    write_atomically(folder / CONFIG, json.dumps(description, indent=2) + "\n")
