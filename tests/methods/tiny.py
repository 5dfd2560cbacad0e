"""Tiny random bases for the tests of trained methods."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from torch import nn

VOCAB = 61
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def base(name: str = "llama") -> Any:
    """A random fp32 model of an architecture, with weights large enough that layers matter."""
    torch.manual_seed(0)
    gpt = {k: SHAPE[k] for k in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
    config = {
        "llama": lambda: tf.LlamaConfig(**SHAPE),
        "gemma2": lambda: tf.Gemma2Config(
            **SHAPE,
            head_dim=8,
            sliding_window=6,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        "phi3": lambda: tf.Phi3Config(**SHAPE),
        "gpt2": lambda: tf.GPT2Config(**gpt, n_embd=32, n_layer=4, n_head=4, n_positions=128),
        "mixtral": lambda: tf.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    }[name]()
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4.0)
    return model


@torch.no_grad()
def disturb(module: nn.Module, scale: float = 0.15, seed: int = 1) -> None:
    """Move every parameter off its start, so that no path is silent."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def ids(batch: int, length: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
