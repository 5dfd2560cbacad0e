"""A tiny model on disk with its tokenizer, and a small structured data set that it has learnt a
little of.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
LETTERS = "abcdefghij"


def tokenizer(template: bool = True) -> PreTrainedTokenizerFast:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate([*SPECIAL, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    out = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>")
    if template:
        out.chat_template = TEMPLATE
    return out


def write_data(path: Path, count: int = 120) -> Path:
    """Answers repeat the question's letters around the alphabet: learnable, not trivial."""
    generator = torch.Generator().manual_seed(0)
    with path.open("w") as handle:
        for _ in range(count):
            picks = torch.randint(0, len(LETTERS), (4,), generator=generator).tolist()
            question = "".join(LETTERS[i] for i in picks)
            answer = "".join(LETTERS[(picks[n % 4] + n // 4) % len(LETTERS)] for n in range(16))
            handle.write(json.dumps({"instruction": question, "output": answer}) + "\n")
    return path


def write_model(path: Path, data: Path, steps: int = 60) -> Path:
    """A 4-layer Llama trained briefly on the data, so that its depth does something."""
    torch.manual_seed(0)
    tok = tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tok),
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=3,
        )
    )
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    texts = [f"<|user|>{r['instruction']}<|end|>\n<|assistant|>{r['output']}<|end|>" for r in rows]
    ids = tok(texts, return_tensors="pt", add_special_tokens=False)["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        batch = ids[
            torch.randint(0, len(ids), (24,), generator=torch.Generator().manual_seed(step))
        ]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    tok.save_pretrained(path)
    return path
