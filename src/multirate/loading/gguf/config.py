"""A GGUF file's metadata as a transformers config: transformers' own table of keys, and what that
table leaves out although it changes what the model computes.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from multirate.errors import UserError, first_line, say_once
from multirate.loading.gguf.file import GgufFile
from multirate.loading.gguf.metadata import MAX_CONTEXT, MAX_SIZE, Metadata
from multirate.loading.gguf.tokenizer import special_tokens

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that say how rotary frequencies are scaled; they become part of the config."""
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What every Llama 3.x was trained with; files keep only the factors that follow from it."""
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""The one size of each Gemma that scales attention by its width per head (llama.cpp: LLM_TYPE_27B).
"""
_NEEDED = ("context_length", "embedding_length", "feed_forward_length", "attention.head_count")
_REAL = {"rope.freq_base", "attention.layer_norm_rms_epsilon"}
"""Keys of transformers' table that are no counts."""
_NOT_NEEDED = {
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.finetuned",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_log_multiplier",
    "attention.sliding_window_pattern",
    "attention.causal",
    "expert_feed_forward_length",
    "expert_weights_scale",
    "vocab_size",
}
"""Keys that say again what others say, or what the model's class knows."""


@dataclass(frozen=True)
class Architecture:
    """A kind of model that is read: transformers' name for it, its key in transformers' table, and
    what it adds to the config that the table makes.
    """

    model_type: str
    table: str
    more: Callable[[Metadata, dict[str, Any]], None]


def _width(data: Metadata, values: dict[str, Any]) -> int:
    """Of one head."""
    heads = data.count("attention.head_count")
    if data.get("attention.key_length") is None and values["hidden_size"] % heads:
        data.refuse("attention.head_count", heads, f"a divisor of {values['hidden_size']}")
    return data.count("attention.key_length", values["hidden_size"] // heads)


def _plain(data: Metadata, values: dict[str, Any]) -> None:
    """Llama, Mistral, Qwen: one kind of attention, rotary over the whole head."""
    width = _width(data, values)
    rotary = data.count("rope.dimension_count", width)
    values_width = data.count("attention.value_length", width)
    if rotary != width or values_width != width:
        raise UserError(
            f"{data.file.path}: heads of {width} keys, {values_width} values and {rotary} rotary "
            "dimensions are not supported for this architecture"
        )
    values["head_dim"] = width
    values["rope_parameters"] = _rope(data, values)
    for name, tensor in (("attention_bias", "attn_q"), ("mlp_bias", "ffn_gate")):
        values[name] = f"blk.0.{tensor}.bias" in data.file.tensors


def _mixtral(data: Metadata, values: dict[str, Any]) -> None:
    _plain(data, values)
    values["num_local_experts"] = data.count("expert_count")
    values["num_experts_per_tok"] = data.count("expert_used_count", most=data.count("expert_count"))


def _qwen3moe(data: Metadata, values: dict[str, Any]) -> None:
    _plain(data, values)
    values["num_experts_per_tok"] = data.count("expert_used_count", most=data.count("expert_count"))
    values["moe_intermediate_size"] = data.count("expert_feed_forward_length")


def _gemma(data: Metadata, values: dict[str, Any]) -> None:
    width = data.count("attention.key_length")
    layers = data.count("block_count")
    whole = values["hidden_size"] // data.count("attention.head_count")
    is_27b = _LAYERS_OF_27B[data.file.architecture] == layers
    values["query_pre_attn_scalar"] = whole if is_27b else width
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if data.get(key) is not None:
            values[key] = data.real(key)


def _gemma2(data: Metadata, values: dict[str, Any]) -> None:
    _gemma(data, values)
    values["rope_parameters"] = _rope(data, values)


def _gemma3(data: Metadata, values: dict[str, Any]) -> None:
    _gemma(data, values)
    local = data.real("rope.freq_base_swa", 10000.0)
    values["rope_parameters"] = {
        "full_attention": _rope(data, values, base=1_000_000.0),
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _phi3(data: Metadata, values: dict[str, Any]) -> None:
    width = _width(data, values)
    rotary = data.count("rope.dimension_count", width, most=width)
    window = data.get("attention.sliding_window")
    values["sliding_window"] = data.count("attention.sliding_window") if window else None
    values["rope_parameters"] = rope = _rope(data, values)
    if rotary != width:
        rope["partial_rotary_factor"] = values["partial_rotary_factor"] = rotary / width
    if "rope_factors_long.weight" in data.file.tensors:
        original = data.count("rope.scaling.original_context_length", most=MAX_CONTEXT)
        rope |= {
            "rope_type": "longrope",
            "long_factor": _rope_factors(data.file, "rope_factors_long.weight", rotary),
            "short_factor": _rope_factors(data.file, "rope_factors_short.weight", rotary),
            "original_max_position_embeddings": original,
        }
        values["original_max_position_embeddings"] = original


ARCHITECTURES = {
    "llama": Architecture("llama", "llama", _plain),
    "qwen2": Architecture("qwen2", "qwen2", _plain),
    "qwen3": Architecture("qwen3", "qwen3", _plain),
    "qwen3moe": Architecture("qwen3_moe", "qwen3_moe", _qwen3moe),
    "gemma2": Architecture("gemma2", "gemma2", _gemma2),
    "gemma3": Architecture("gemma3_text", "gemma3", _gemma3),
    "phi3": Architecture("phi3", "phi3", _phi3),
}
"""By the name in `general.architecture`. Mistral's and Mixtral's files say "llama"."""
_MIXTRAL = Architecture("mixtral", "llama", _mixtral)


def architecture_of(file: GgufFile) -> Architecture:
    """UserError naming an architecture that is not read."""
    if file.architecture not in ARCHITECTURES:
        accepted = ", ".join(ARCHITECTURES)
        raise UserError(
            f"{file.path}: GGUF files of architecture {reprlib.repr(file.architecture)} are not "
            f"supported; accepted: {accepted}"
        )
    if file.architecture == "llama" and file.metadata.get("llama.expert_count"):
        return _MIXTRAL
    return ARCHITECTURES[file.architecture]


def read_config(file: GgufFile) -> PretrainedConfig:
    """The transformers config that the file means. Raises UserError for what is missing or not
    supported; keys of the architecture that are not understood are said once.
    """
    kind = architecture_of(file)
    data = Metadata(file, f"{file.architecture}.")
    layers = data.count("block_count")
    if layers > len(file.tensors) or "token_embd.weight" not in file.tensors:
        raise UserError(
            f"{file.path} is damaged or incomplete: {len(file.tensors)} tensors are too few for "
            f"a model of {layers} layers and its embedding"
        )
    shape = file.tensors["token_embd.weight"].shape
    if len(shape) != 2 or shape[1] != data.count("embedding_length"):
        raise UserError(
            f"{file.path} is damaged: embedding_length is {data.get('embedding_length')}, but "
            f"token_embd.weight has the shape {shape}"
        )
    if not data.flag("attention.causal", True):
        data.refuse("attention.causal", False, "true: a causal model")
    values: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(kind.table, {}))
    table: dict[str, str | None] = dict(GGUF_CONFIG_MAPPING)[kind.table]  # type: ignore[assignment]
    for key, name in table.items():
        if name is not None and (key in _NEEDED or data.get(key) is not None):
            most = MAX_CONTEXT if key == "context_length" else MAX_SIZE
            values[name] = data.real(key) if key in _REAL else data.count(key, most=most)
    values["rms_norm_eps"] = data.real("attention.layer_norm_rms_epsilon")
    values.pop("rope_theta", None)  # part of rope_parameters
    values |= {"vocab_size": shape[0], "tie_word_embeddings": "output.weight" not in file.tensors}
    heads, groups = data.count("attention.head_count"), values.get("num_key_value_heads")
    if groups and heads % groups:
        data.refuse("attention.head_count_kv", groups, f"a divisor of the {heads} heads")
    special = special_tokens(file)
    values |= {f"{name}_token_id": special[name] for name in ("bos", "eos")}
    values["pad_token_id"] = special["padding"]
    kind.more(data, values)
    for name in data.unread(_NOT_NEEDED):
        say_once(f"{file.path.name}: ignoring the unknown field {file.architecture}.{name}")
    with refusing(file):
        return AutoConfig.for_model(kind.model_type, **values)


@contextmanager
def refusing(file: GgufFile) -> Iterator[None]:
    """UserError for what transformers, torch and numpy say to sizes that cannot be a model's."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        logging.getLogger(__name__).debug("model of %s", file.path, exc_info=True)
        raise UserError(
            f"{file.path} is damaged or not supported: its sizes do not form a "
            f"{file.architecture} model ({first_line(error)})"
        ) from error


def _rope(data: Metadata, values: dict[str, Any], base: float = 10_000.0) -> dict[str, Any]:
    """The rotary embedding's parameters: plain, linear, yarn, or Llama 3's."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": data.real("rope.freq_base", base),
    }
    scaling = data.text("rope.scaling.type", "none")
    key = "rope.scaling.factor" if data.get("rope.scaling.factor") else "rope.scale_linear"
    scaled = data.get(key) not in (None, 0, 1)
    if scaling == "linear" or (scaling == "none" and scaled):
        rope |= {"rope_type": "linear", "factor": data.real(key)}
    elif scaling == "yarn":
        whole = values["max_position_embeddings"]
        original = data.count("rope.scaling.original_context_length", whole, most=MAX_CONTEXT)
        rope |= {
            "rope_type": "yarn",
            "factor": data.real(key),
            "original_max_position_embeddings": original,
        }
    elif scaling not in ("none", "longrope"):
        data.refuse("rope.scaling.type", scaling, "none, linear, yarn, longrope (Phi-3)")
    if "rope_freqs.weight" in data.file.tensors:
        with refusing(data.file):
            rope = _llama3(data.file, rope, values)
    return rope


def _rope_factors(file: GgufFile, name: str, rotary: int) -> list[float]:
    if name not in file.tensors:
        raise UserError(f"{file.path} has no tensor {name}")
    factors = file.values(name)
    if factors.shape != (rotary // 2,) or not (np.isfinite(factors) & (factors > 0)).all():
        raise UserError(
            f"{file.path} is damaged: tensor {name} must hold {rotary // 2} numbers above 0, one "
            f"for each rotary frequency; its shape is {factors.shape}"
        )
    return [float(factor) for factor in factors]


def _llama3(file: GgufFile, rope: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's scaling from its factors by frequency, if these are what it gives."""
    factors = file.values("rope_freqs.weight")
    rope = rope | _LLAMA3 | {"rope_type": "llama3", "factor": float(factors.max())}
    config = AutoConfig.for_model("llama", **{**values, "rope_parameters": rope})
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    width = values["head_dim"]
    plain = rope["rope_theta"] ** (-np.arange(0, width, 2) / width)
    if factors.shape != plain.shape or not np.allclose(plain / factors, frequencies, rtol=1e-3):
        raise UserError(
            f"{file.path}: rope_freqs.weight does not follow Llama 3's scaling of rotary "
            "frequencies, the only one supported"
        )
    return rope
