"""Tiny random models and untrained, disturbed streams for the tests of M2R2's decoding."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, OlmoeConfig

from multirate.methods._shared.shape import BaseShape
from multirate.methods.m2r2.config import M2R2Config
from multirate.methods.m2r2.modules import AcceleratedStream

LLAMA = LlamaConfig(
    vocab_size=61,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=160,
)
OTHERS = {
    "gpt2": GPT2Config(n_layer=3, n_embd=48, n_head=4, vocab_size=61, n_positions=160),
    "olmoe": OlmoeConfig(
        vocab_size=61,
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=160,
    ),
}
PROMPTS = [[5, 9, 2, 44, 17], [3], [8] * 11]


def model_of(config, dtype=torch.float32):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(
                    3.0
                )  # spread logits: a random model's argmax must not be a coin toss
    return model.to(dtype)


def taps_of(preset, gate):
    """Of a stream of LLAMA that reads as many inner residuals as it can."""
    return tuple(range(gate + 1, LLAMA.num_hidden_layers)) if preset == "m2r2-carry" else ()


def stream_of(config, preset, seed=0, scale=0.05, **options):
    torch.manual_seed(seed)
    base = BaseShape.of(config)
    stream = AcceleratedStream(M2R2Config.for_base(base, preset, **options), base)
    with torch.no_grad():
        for parameter in stream.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    return stream
