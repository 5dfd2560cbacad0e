"""Tiny random models of every architecture that the decoders are proven on."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers as tf

VOCAB = 89
WINDOW = 6
MAX_POSITIONS = 96

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_MOE: dict[str, Any] = {"num_experts_per_tok": 2}


def _configs() -> dict[str, tf.PretrainedConfig]:
    gpt_shape = {
        k: SHAPE[k] for k in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
    }
    return {
        "llama": tf.LlamaConfig(**SHAPE, tie_word_embeddings=True),
        "mistral": tf.MistralConfig(**SHAPE, sliding_window=WINDOW),
        "qwen2": tf.Qwen2Config(
            **SHAPE, use_sliding_window=True, sliding_window=WINDOW, layer_types=_MIXED
        ),
        "qwen3": tf.Qwen3Config(**SHAPE, head_dim=12),
        "gemma": tf.GemmaConfig(**SHAPE, head_dim=12),
        "gemma2": tf.Gemma2Config(
            **SHAPE,
            head_dim=12,
            sliding_window=WINDOW,
            layer_types=_MIXED,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        "gemma3_text": tf.Gemma3TextConfig(
            **SHAPE,
            head_dim=12,
            sliding_window=WINDOW,
            layer_types=_MIXED,
            query_pre_attn_scalar=16,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            },
        ),
        "phi3": tf.Phi3Config(**SHAPE, sliding_window=WINDOW),
        "olmo2": tf.Olmo2Config(**SHAPE),
        "gpt2": tf.GPT2Config(
            **gpt_shape,
            n_embd=32,
            n_layer=3,
            n_head=4,
            n_positions=MAX_POSITIONS,
            scale_attn_by_inverse_layer_idx=True,
        ),
        "olmoe": tf.OlmoeConfig(**SHAPE, **_MOE, num_experts=5, clip_qkv=2.0),
        "mixtral": tf.MixtralConfig(**SHAPE, **_MOE, num_local_experts=5, sliding_window=WINDOW),
        "qwen3_moe": tf.Qwen3MoeConfig(
            **SHAPE,
            **_MOE,
            num_experts=5,
            moe_intermediate_size=24,
            head_dim=12,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        ),
        "gpt_oss": tf.GptOssConfig(
            **SHAPE,
            **_MOE,
            num_local_experts=5,
            head_dim=12,
            sliding_window=WINDOW,
            layer_types=_MIXED,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
    }


NAMES = tuple(_configs())
WINDOWED = {"mistral", "qwen2", "gemma2", "gemma3_text", "phi3", "mixtral", "gpt_oss"}
MOE = {"olmoe", "mixtral", "qwen3_moe", "gpt_oss"}


def randomised(config: tf.PretrainedConfig, seed: int) -> Any:
    """A random float32 model in evaluation mode, all of whose parts matter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = tf.AutoModelForCausalLM.from_config(config).float().eval()
        embeddings = model.get_input_embeddings().weight
        with torch.no_grad():
            for parameter in model.parameters():
                # Wide enough that attention, experts and the head all matter; vectors (norms,
                # biases, sinks) off their neutral start, so that a forgotten one shows.
                noise = torch.randn_like(parameter)
                parameter.copy_(parameter + 0.2 * noise if parameter.ndim == 1 else 0.3 * noise)
            # Small against what the layers add, else a tied head repeats the last token for ever.
            embeddings.mul_(0.2)
    return model


@cache
def tiny_model(name: str) -> Any:
    """The model of a name, the same object at every call: leave it as you found it."""
    return randomised(_configs()[name], seed=NAMES.index(name))


def prompts(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    """Random token ids, one vector per length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (n,), generator=generator) for n in lengths]
