"""Writes the initial weights of a small draft model for `two_model`: a Llama with MODEL's
tokenizer.

    python lab/recipes/smollm2/draft_model.py --model smollm2 --out runs/draft/start
    python lab/recipes/tasks/tune.py --model runs/draft/start --whole --lr 0.002 --steps 1000 \
        --data runs/draft/own.jsonl --out runs/draft/model
    multirate generate MODEL --method two_model:draft=runs/draft/model -p "Why is the sky blue?"

Its token embeddings, which are also its head, are MODEL's, projected on their principal directions,
so that similar words are similar before training begins. Its layers are random. Train it on MODEL's
own answers, because these are what it has to predict. draft_model.sh does all of this.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from multirate.loading.hub import load_model

HEAD_DIM = 32


def main_directions(embeddings: torch.Tensor, width: int) -> torch.Tensor:
    """embeddings [V, d] → [V, width], in the basis of the largest principal directions."""
    values, vectors = torch.linalg.eigh(embeddings.T @ embeddings)
    return embeddings @ vectors[:, values.argsort(descending=True)[:width]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="the model to draft for")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--width", type=int, default=128, help=f"a multiple of {HEAD_DIM}")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    width = arguments.width
    if width < HEAD_DIM or width % HEAD_DIM:
        parser.error(f"--width {width}; accepted: a multiple of {HEAD_DIM}")
    torch.manual_seed(arguments.seed)

    loaded = load_model(arguments.model, device="cpu")
    base: Any = loaded.model
    config = LlamaConfig(
        vocab_size=base.config.vocab_size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=width // HEAD_DIM,
        num_key_value_heads=width // HEAD_DIM,
        max_position_embeddings=base.config.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=base.config.bos_token_id,
        eos_token_id=base.config.eos_token_id,
        pad_token_id=base.config.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        embeddings = main_directions(base.get_input_embeddings().weight.float(), width)
        # scaled to the usual initial size of Llama's embeddings
        model.get_input_embeddings().weight.copy_(embeddings * (0.02 / embeddings.std()))
    model.save_pretrained(arguments.out)
    loaded.tokenizer.save_pretrained(arguments.out)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{arguments.out}: {count / 1e6:.1f}M parameters, {arguments.layers} layers of {width}")


if __name__ == "__main__":
    main()
