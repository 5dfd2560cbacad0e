"""A GGUF file's metadata as a transformers config: transformers' own table of keys, and what that
table leaves out although it changes what the model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from multirate.errors import UserError, say_once
from multirate.gguf_models.file import GgufFile

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
_IMPOSSIBLE = (
    ArithmeticError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    StrictDataclassError,
)
"""What transformers and torch raise for sizes that do not go together."""
_NEEDED = (
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
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


class _Metadata:
    """The keys of the file's architecture; remembers which were asked for."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._prefix = f"{file.architecture}."
        self._read: set[str] = set()

    def get(self, key: str, otherwise: Any = None) -> Any:
        """A value; the same one for every layer where it is given by layer."""
        self._read.add(key)
        value = self.file.metadata.get(self._prefix + key, otherwise)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UserError(
                    f"{self.file.path}: {self._prefix}{key} differs between layers, and models "
                    "whose layers differ in size are not supported"
                )
            value = value[0]
        return value

    def number(self, key: str) -> Any:
        """A value that has to be there, above 0."""
        value = self.get(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise UserError(
                f"{self.file.path} is damaged or incomplete: {self._prefix}{key} is {value!r}, "
                "a number above 0 is needed"
            )
        return value

    def unread(self) -> list[str]:
        """The keys nobody asked for, and that nobody has to know."""
        keys = (key for key in self.file.metadata if key.startswith(self._prefix))
        names = (key.removeprefix(self._prefix) for key in keys)
        return [name for name in names if name not in self._read | _NOT_NEEDED]


@dataclass(frozen=True)
class Architecture:
    """A kind of model that is read: transformers' name for it, its key in transformers' table, and
    what it adds to the config that the table makes.
    """

    model_type: str
    table: str
    more: Callable[[_Metadata, dict[str, Any]], None]


def _plain(data: _Metadata, values: dict[str, Any]) -> None:
    """Llama, Mistral, Qwen: one kind of attention, rotary over the whole head."""
    width = data.get("attention.key_length") or values["hidden_size"] // data.number(
        "attention.head_count"
    )
    rotary = data.get("rope.dimension_count", width)
    if rotary != width or data.get("attention.value_length", width) != width:
        raise UserError(
            f"{data.file.path}: heads of {width} keys, {data.get('attention.value_length', width)} "
            f"values and {rotary} rotary dimensions are not supported for this architecture"
        )
    values["head_dim"] = width
    values["rope_parameters"] = _rope(data, values)
    for name, tensor in (("attention_bias", "attn_q"), ("mlp_bias", "ffn_gate")):
        values[name] = f"blk.0.{tensor}.bias" in data.file.tensors


def _mixtral(data: _Metadata, values: dict[str, Any]) -> None:
    _plain(data, values)
    values["num_local_experts"] = data.number("expert_count")
    values["num_experts_per_tok"] = data.number("expert_used_count")


def _qwen3moe(data: _Metadata, values: dict[str, Any]) -> None:
    _plain(data, values)
    values["moe_intermediate_size"] = data.number("expert_feed_forward_length")


def _gemma(data: _Metadata, values: dict[str, Any]) -> None:
    width = data.number("attention.key_length")
    layers = data.number("block_count")
    whole = values["hidden_size"] // data.number("attention.head_count")
    is_27b = _LAYERS_OF_27B[data.file.architecture] == layers
    values["query_pre_attn_scalar"] = whole if is_27b else width
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if data.get(key) is not None:
            values[key] = data.get(key)


def _gemma2(data: _Metadata, values: dict[str, Any]) -> None:
    _gemma(data, values)
    values["rope_parameters"] = _rope(data, values)


def _gemma3(data: _Metadata, values: dict[str, Any]) -> None:
    _gemma(data, values)
    local = data.get("rope.freq_base_swa", 10000.0)
    values["rope_parameters"] = {
        "full_attention": _rope(data, values, base=1_000_000.0),
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _phi3(data: _Metadata, values: dict[str, Any]) -> None:
    width = data.get("attention.key_length") or values["hidden_size"] // data.number(
        "attention.head_count"
    )
    rotary = data.get("rope.dimension_count", width)
    values["sliding_window"] = data.get("attention.sliding_window") or None
    values["rope_parameters"] = rope = _rope(data, values)
    if rotary != width:
        rope["partial_rotary_factor"] = values["partial_rotary_factor"] = rotary / width
    if "rope_factors_long.weight" in data.file.tensors:
        original = data.number("rope.scaling.original_context_length")
        rope |= {
            "rope_type": "longrope",
            "long_factor": data.file.values("rope_factors_long.weight").tolist(),
            "short_factor": data.file.values("rope_factors_short.weight").tolist(),
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
            f"{file.path}: GGUF files of architecture {file.architecture!r} are not supported; "
            f"accepted: {accepted}"
        )
    if file.architecture == "llama" and file.metadata.get("llama.expert_count"):
        return _MIXTRAL
    return ARCHITECTURES[file.architecture]


def read_config(file: GgufFile) -> PretrainedConfig:
    """The transformers config that the file means. Raises UserError for what is missing or not
    supported; keys of the architecture that are not understood are said once.
    """
    kind = architecture_of(file)
    data = _Metadata(file)
    layers = data.number("block_count")
    for key in _NEEDED:
        data.number(key)
    if layers > len(file.tensors) or "token_embd.weight" not in file.tensors:
        raise UserError(
            f"{file.path} is damaged or incomplete: {len(file.tensors)} tensors cannot be a model "
            f"of {layers} layers and its embedding"
        )
    vocabulary, width = file.tensors["token_embd.weight"].shape
    if width != data.number("embedding_length"):
        raise UserError(
            f"{file.path} is damaged: embedding_length is {data.get('embedding_length')}, "
            f"and token_embd.weight has rows of {width}"
        )
    values: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(kind.table, {}))
    table: dict[str, str | None] = dict(GGUF_CONFIG_MAPPING)[kind.table]  # type: ignore[assignment]
    for key, name in table.items():
        value = data.get(key)
        if name is not None and value is not None:
            values[name] = value
    values.pop("rope_theta", None)  # part of rope_parameters
    values |= {"vocab_size": vocabulary, "tie_word_embeddings": "output.weight" not in file.tensors}
    for name in ("bos", "eos", "padding"):
        token = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        values[f"{name.removesuffix('ding')}_token_id"] = token
    kind.more(data, values)
    for name in data.unread():
        say_once(f"{file.path.name}: {file.architecture}.{name} is not known and not used")
    with refusing(file):
        return AutoConfig.for_model(kind.model_type, **values)


@contextmanager
def refusing(file: GgufFile) -> Iterator[None]:
    """UserError for what transformers says to sizes that cannot be a model's."""
    try:
        yield
    except _IMPOSSIBLE as error:
        first = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"{file.path} is damaged or not supported: its sizes do not make a "
            f"{file.architecture} model ({first})"
        ) from error


def ends(file: GgufFile) -> list[int]:
    """The ids that end a text: of the text, of a turn, of a message."""
    names = ("eos", "eot", "eom")
    found = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    return list(dict.fromkeys(token for token in found if isinstance(token, int)))


def _rope(data: _Metadata, values: dict[str, Any], base: float = 10_000.0) -> dict[str, Any]:
    """The rotary embedding's parameters: plain, linear, yarn, or Llama 3's."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": data.get("rope.freq_base", base),
    }
    scaling = data.get("rope.scaling.type", "none")
    factor = data.get("rope.scaling.factor") or data.get("rope.scale_linear")
    original = data.get("rope.scaling.original_context_length")
    if scaling == "linear" or (scaling == "none" and factor not in (None, 1.0)):
        rope |= {"rope_type": "linear", "factor": data.number("rope.scaling.factor")}
    elif scaling == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": data.number("rope.scaling.factor"),
            "original_max_position_embeddings": original or values["max_position_embeddings"],
        }
    elif scaling not in ("none", "longrope"):
        raise UserError(
            f"{data.file.path}: rope.scaling.type {scaling!r} is not supported; accepted: none, "
            "linear, yarn, longrope (Phi-3)"
        )
    if "rope_freqs.weight" in data.file.tensors:
        rope = _llama3(data.file, rope, values)
    return rope


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
            f"{file.path}: rope_freqs.weight is not Llama 3's scaling of rotary frequencies, "
            "and no other is supported"
        )
    return rope
