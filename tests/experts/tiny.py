"""Tiny mixture-of-experts checkpoints of every family, saved as transformers saves them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor

from multirate.experts.loader import Prediction
from multirate.experts.predictors import Predictor

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


class Shuffled(Predictor):
    """Another predictor's rows with other experts: a control, as many reads and no knowledge."""

    def __init__(self, inner: Predictor, num_experts: int, seed: int = 0) -> None:
        self._inner, self._num, self._random = inner, num_experts, random.Random(seed)
        self.most_depth = inner.most_depth

    def began(self, rows: int) -> None:
        self._inner.began(rows)

    def used(self, row: int, experts: Sequence[int]) -> None:
        self._inner.used(row, experts)

    def routed(self, experts: Tensor, weights: Tensor) -> None:
        self._inner.routed(experts, weights)

    def predict(self, row: int, residual: Tensor) -> list[Prediction]:
        self._inner.depth = self.depth
        found = self._inner.predict(row, residual)
        others: dict[int, list[int]] = {}
        for one in found:
            if one.deadline not in others:
                others[one.deadline] = self._random.sample(range(self._num), self._num)
        return [
            Prediction((one.key[0], others[one.deadline].pop()), one.deadline, one.chance)
            for one in found
        ]
