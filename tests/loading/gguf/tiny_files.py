"""GGUF files of tiny random models, written as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as tf
from gguf import GGMLQuantizationType
from tokenizers import pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<pad>", "<eos>", "<|user|>", "<|assistant|>", "<|end|>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll"]
CONTEXT = 64
WINDOW = 8

_SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def _rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta} | scaling


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LONG = {
    "rope_type": "longrope",
    "long_factor": [1.5 + i for i in range(8)],
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "original_max_position_embeddings": 16,
}


def configs(**sizes: int) -> dict[str, tuple[str, tf.PretrainedConfig]]:
    """By name: llama.cpp's architecture, and the config. sizes: other ones than the tiny."""
    shape = _SHAPE | sizes
    return {
        "llama": ("llama", tf.LlamaConfig(**shape, tie_word_embeddings=True)),
        "llama_untied": ("llama", tf.LlamaConfig(**shape, rope_parameters=_rope(5e5))),
        "llama3": ("llama", tf.LlamaConfig(**shape, rope_parameters=_rope(5e5, **_LLAMA3))),
        "llama_linear": (
            "llama",
            tf.LlamaConfig(**shape, rope_parameters=_rope(1e4, rope_type="linear", factor=4.0)),
        ),
        "qwen2": ("qwen2", tf.Qwen2Config(**shape, rope_parameters=_rope(1e6))),
        "qwen3": ("qwen3", tf.Qwen3Config(**shape, head_dim=32, rope_parameters=_rope(1e6))),
        "gemma2": (
            "gemma2",
            tf.Gemma2Config(
                **shape,
                head_dim=32,
                sliding_window=WINDOW,
                query_pre_attn_scalar=32,
                attn_logit_softcapping=2.0,
                final_logit_softcapping=3.0,
            ),
        ),
        "gemma3": (
            "gemma3",
            tf.Gemma3TextConfig(
                **shape | {"num_hidden_layers": 6},
                head_dim=32,
                sliding_window=WINDOW,
                query_pre_attn_scalar=32,
                rope_parameters={
                    "full_attention": _rope(1e6, rope_type="linear", factor=8.0),
                    "sliding_attention": _rope(1e4),
                },
            ),
        ),
        "phi3": ("phi3", tf.Phi3Config(**shape, sliding_window=WINDOW)),
        "phi3_long": (
            "phi3",
            tf.Phi3Config(
                **shape,
                rope_parameters=_rope(1e4, **_LONG),
                original_max_position_embeddings=16,
            ),
        ),
        "mixtral": (
            "llama",
            tf.MixtralConfig(**shape, num_local_experts=4, num_experts_per_tok=2),
        ),
        "qwen3moe": (
            "qwen3moe",
            tf.Qwen3MoeConfig(
                **shape,
                head_dim=32,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                norm_topk_prob=True,
                rope_parameters=_rope(1e6),
            ),
        ),
    }


NAMES = tuple(configs())


def tiny(name: str, **sizes: int) -> Any:
    """A random float32 model whose norms and biases are off their neutral start."""
    torch.manual_seed(NAMES.index(name))
    model = tf.AutoModelForCausalLM.from_config(configs(**sizes)[name][1]).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(parameter + 0.2 * noise if parameter.ndim == 1 else 0.2 * noise)
    return model


def write(
    path: Path,
    name: str = "llama",
    kind: GGMLQuantizationType | Mapping[str, GGMLQuantizationType] = GGMLQuantizationType.F32,
    *,
    model: Any = None,
    leave_out: tuple[str, ...] = (),
    more: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    architecture: str | None = None,
) -> Path:
    """The file of a tiny model; its matrices as `kind`, which may differ by parts of their names
    ("": all others; K-quants hold random numbers instead of the model's). leave_out: tensors; more:
    keys; tensors: further ones; architecture: what it says it is.
    """
    real, _ = configs()[name]
    model = model or tiny(name)
    writer = gguf.GGUFWriter(path, architecture or real)
    _metadata(writer, architecture or real, model.config)
    for key, value in (more or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    named = {**_tensors(model, real), **(tensors or {})}
    for tensor, values in named.items():
        if tensor in leave_out:
            continue
        if values.ndim < 2 or "ffn_gate_inp" in tensor:
            writer.add_tensor(tensor, values.astype(np.float32))
        else:
            kinds = kind if isinstance(kind, Mapping) else {"": kind}
            own = next(kinds[part] for part in sorted(kinds, key=len)[::-1] if part in tensor)
            data = (
                random_blocks(own, values.shape) if own in _SCALES else gguf.quantize(values, own)
            )
            writer.add_tensor(tensor, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_SCALES = {
    GGMLQuantizationType.Q4_K: {0: 1e-4, 2: 8e-4},
    GGMLQuantizationType.Q5_K: {0: 5e-5, 2: 8e-4},
    GGMLQuantizationType.Q6_K: {208: 2e-5},
}
"""Formats that the package gguf cannot write: where a block has its half-precision scales, and
values for these that make numbers of about 0.05.
"""


def random_blocks(kind: GGMLQuantizationType, shape: tuple[int, ...]) -> np.ndarray:
    """A K-quant's blocks [rows, row_bytes], any bits but for the scales."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(int(kind))
    blocks = draw.integers(0, 256, (*shape[:-1], shape[-1] // block, size), np.uint8)
    for at, scale in _SCALES[kind].items():
        blocks[..., at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _metadata(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(width)
    writer.add_value_length(width)
    if not architecture.startswith("gemma"):
        writer.add_rope_dimension_count(width)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key, None) is not None:
            writer.add_float32(f"{architecture}.{key}", getattr(config, key))
    experts = getattr(config, "num_local_experts", getattr(config, "num_experts", None))
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_merges(["h e", "l l"])
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(4)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)


def _tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    config = model.config
    number = next(n for n, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        stem, _, leaf = name.rpartition(".")
        if stem.endswith("experts"):
            block = f"blk.{name.split('.')[2]}"
            if leaf == "down_proj":
                found[f"{block}.ffn_down_exps.weight"] = values
            else:
                gate, up = np.split(values, 2, axis=1)
                found[f"{block}.ffn_gate_exps.weight"] = np.ascontiguousarray(gate)
                found[f"{block}.ffn_up_exps.weight"] = np.ascontiguousarray(up)
            continue
        target = f"{names.get_name(stem)}.{leaf}"
        if architecture == "llama" and ("attn_q." in target or "attn_k." in target):
            heads = config.num_attention_heads if "attn_q" in target else config.num_key_value_heads
            apart = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = np.ascontiguousarray(apart.swapaxes(1, 2).reshape(values.shape))
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        found[target] = values
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        scaled = model.model.rotary_emb.inv_freq.numpy()
        width = config.head_dim
        plain = rope["rope_theta"] ** (-np.arange(0, width, 2, dtype=np.float64) / width)
        found["rope_freqs.weight"] = (plain / scaled).astype(np.float32)
    if rope.get("rope_type") == "longrope":
        found["rope_factors_long.weight"] = np.array(rope["long_factor"], np.float32)
        found["rope_factors_short.weight"] = np.array(rope["short_factor"], np.float32)
    return found
