"""A tiny random Llama with a tokenizer and chat template, as a user would have it on disk. Shared
by several tests.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes plus five special tokens: 261 ids, loss-free for any text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=261, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        chat_template=TEMPLATE,
    )


def model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    """Four layers of width 64 with weights large enough that greedy text is not one token
    repeated.
    """
    settings: dict[str, Any] = dict(
        vocab_size=261,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).to(dtype).eval()


@cache
def _shared() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    return model(), tokenizer()


def save(folder: Path) -> Path:
    """The default tiny model and its tokenizer as a transformers folder."""
    network, words = _shared()
    network.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
