"""A transformers config as the keys of a GGUF file: the inverse of loading/gguf/config.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gguf import RopeScalingType
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from multirate.errors import UserError, say_once

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
"""Transformers' model type → llama.cpp's architecture."""
_WINDOWED = ("gemma2", "gemma3", "phi3")
"""Architectures whose files give the length of sliding windows."""
_COMPARED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
    *("tie_word_embeddings", "rms_norm_eps", "hidden_act", "hidden_activation"),
    *("attention_bias", "mlp_bias", "query_pre_attn_scalar", "attn_logit_softcapping"),
    *("final_logit_softcapping", "partial_rotary_factor", "use_bidirectional_attention"),
    *("rope_parameters", "sliding_window", "layer_types"),
)
"""The fields of a config that change what the model computes."""
_TOLERANCE = 1e-6  # relative: a GGUF file holds real numbers as float32


def architecture_for(config: PretrainedConfig) -> str:
    """llama.cpp's architecture for a model. UserError naming one that is not written."""
    if config.model_type not in ARCHITECTURES:
        raise UserError(
            f"models of type {config.model_type!r} cannot be written as GGUF files; accepted: "
            f"{', '.join(ARCHITECTURES)}, or a GGUF file of any architecture that multirate reads"
        )
    return ARCHITECTURES[config.model_type]


def config_keys(config: Any) -> dict[str, Any]:
    """The keys of a model's architecture. UserError for a rotary scaling that GGUF files lack."""
    architecture = architecture_for(config)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = _main_rope(config)
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads or heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": int(width * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope["rope_theta"]),
        **_scaling_keys(config, rope),
    }
    if architecture in _WINDOWED:
        keys["attention.sliding_window"] = _window(config) or 0
    if architecture == "gemma3":
        keys["rope.freq_base_swa"] = float(
            config.rope_parameters["sliding_attention"]["rope_theta"]
        )
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            keys[name] = float(getattr(config, name))
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def rope_tensors(config: Any) -> dict[str, np.ndarray]:
    """The tensors in which a GGUF file states factors for each rotary frequency, float32."""
    rope = _main_rope(config)
    if rope["rope_type"] == "longrope":
        return {
            f"rope_factors_{length}.weight": np.array(rope[f"{length}_factor"], np.float32)
            for length in ("long", "short")
        }
    if rope["rope_type"] != "llama3":
        return {}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = rope["rope_theta"] ** (-np.arange(0, 2 * len(scaled), 2) / (2 * len(scaled)))
    return {"rope_freqs.weight": (plain / scaled.double().numpy()).astype(np.float32)}


def check_config(config: Any, written: Any, name: str) -> None:
    """Compares a model's config with what its file gives when it is read. UserError for a setting
    that the file cannot state; a sliding window that is lost is said once.
    """
    lost = _window(config) if _window(written) is None else None
    if lost is not None:
        say_once(
            f"GGUF files of architecture {ARCHITECTURES[config.model_type]!r} have no sliding "
            f"window, so texts of more than {lost} tokens get other answers than from {name}"
        )
    for field in _COMPARED:
        if lost is not None and field in ("sliding_window", "layer_types"):
            continue
        value = getattr(config, field, None)
        if value is not None and not _same(value, getattr(written, field, None)):
            raise UserError(
                f"{name} cannot be written as a GGUF file: its config has {field} {value!r}, which "
                f"would be read as {getattr(written, field, None)!r}"
            )


def _main_rope(config: Any) -> dict[str, Any]:
    """The rotary parameters; where layers differ, those of the layers without a window."""
    rope: dict[str, Any] = config.rope_parameters
    return rope.get("full_attention", rope)


def _window(config: Any) -> int | None:
    """The length of the sliding window that any layer has."""
    layers = getattr(config, "layer_types", None)
    if layers is not None and "sliding_attention" not in layers:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


def _scaling_keys(config: Any, rope: dict[str, Any]) -> dict[str, Any]:
    kind = rope["rope_type"]
    if kind in ("default", "llama3"):  # Llama 3's is a tensor
        return {}
    if kind == "linear":
        name, more = RopeScalingType.LINEAR, {"factor": float(rope["factor"])}
    elif kind == "yarn":
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        name = RopeScalingType.YARN
        more = {"factor": float(rope["factor"]), "original_context_length": original}
    elif kind == "longrope":
        original = rope["original_max_position_embeddings"]
        name = RopeScalingType.LONGROPE
        more = {
            "original_context_length": original,
            "attn_factor": _longrope_attention(config, rope, original),
        }
    else:
        raise UserError(
            f"a rotary embedding of type {kind!r} cannot be written to a GGUF file; accepted: "
            "default, linear, llama3, yarn, longrope"
        )
    return {"rope.scaling.type": name.value} | {
        f"rope.scaling.{key}": value for key, value in more.items()
    }


def _longrope_attention(config: Any, rope: dict[str, Any], original: int) -> float:
    """By what transformers multiplies cosines and sines, which llama.cpp takes from the file."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor = rope.get("factor") or config.max_position_embeddings / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _same(value: Any, other: Any) -> bool:
    """Equal, but for the rounding of float32; a mapping's None counts as absent."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return all(
            _same(value.get(key), other.get(key)) for key in {*value, *other} if key is not None
        )
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, float) or isinstance(other, float):
        numbers = isinstance(value, (int, float)) and isinstance(other, (int, float))
        return numbers and math.isclose(value, other, rel_tol=_TOLERANCE)
    return bool(value == other)
