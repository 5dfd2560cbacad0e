"""Tiny mixture-of-experts checkpoints of every family, saved as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf

SHAPE: dict[str, Any] = dict(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=96,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
FAMILIES = ("olmoe", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")
EXPERTS, TOP_K = 6, 2


def config(family: str) -> Any:
    experts = dict(num_experts=EXPERTS, num_experts_per_tok=TOP_K)
    local = dict(num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
    return {
        "olmoe": lambda: tf.OlmoeConfig(**SHAPE, intermediate_size=16, **experts),
        "mixtral": lambda: tf.MixtralConfig(**SHAPE, intermediate_size=16, **local),
        "qwen2_moe": lambda: tf.Qwen2MoeConfig(
            **SHAPE,
            intermediate_size=24,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=20,
            **experts,
        ),
        "qwen3_moe": lambda: tf.Qwen3MoeConfig(
            **SHAPE,
            intermediate_size=24,
            moe_intermediate_size=16,
            head_dim=8,
            norm_topk_prob=True,
            **experts,
        ),
        "gpt_oss": lambda: tf.GptOssConfig(
            **SHAPE,
            intermediate_size=16,
            head_dim=8,
            sliding_window=8,
            **local,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    }[family]()


def model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    made = tf.AutoModelForCausalLM.from_config(config(family), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.3)
    return made.to(dtype)


def save(
    family: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shard: str = "50GB",
) -> Any:
    made = model(family, dtype, seed)
    made.save_pretrained(folder, max_shard_size=shard)
    return made
