"""What the kernel is worth to models of other families: our plain loop with it, our plain loop
through the model's own layers, and transformers' `generate`.

    python benchmarks/families.py gemma-3-270m gemma-3-1b --json benchmarks/results/families.json

Random weights, in bf16, of the sizes that the published models have. Everything is interleaved in
one process, model by model; medians over repeats. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode_loop import our_loop, prompt_of, seconds, their_loop  # beside this file
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5Config,
    Exaone4Config,
    Gemma3TextConfig,
    GraniteConfig,
    HunYuanDenseV1Config,
    Ministral3Config,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    SmolLM3Config,
)

from multirate.bench.provenance import collect
from multirate.model.load import load_decoder

_NO_ENDS: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}


def _gemma3(hidden: int, layers: int, inner: int) -> PretrainedConfig:
    return Gemma3TextConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        vocab_size=262144,
        sliding_window=512,
        max_position_embeddings=32768,
        **_NO_ENDS,
    )


SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "gemma-3-270m": lambda: _gemma3(640, 18, 2048),
    "gemma-3-1b": lambda: _gemma3(1152, 26, 6912),
    "ernie-4.5-0.3b": lambda: Ernie4_5Config(
        hidden_size=1024,
        num_hidden_layers=18,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=103424,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        **_NO_ENDS,
    ),
    "hunyuan-0.5b": lambda: HunYuanDenseV1Config(
        hidden_size=1024,
        num_hidden_layers=24,
        intermediate_size=3584,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=120818,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1e3, "factor": 1.0},
        tie_word_embeddings=True,
        **_NO_ENDS,
    ),
    "exaone-4-1.2b": lambda: Exaone4Config(
        hidden_size=2048,
        num_hidden_layers=30,
        intermediate_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=102400,
        max_position_embeddings=32768,
        sliding_window=None,
        layer_types=["full_attention"] * 30,
        tie_word_embeddings=True,
        **_NO_ENDS,
    ),
    "ministral-3-3b": lambda: Ministral3Config(
        hidden_size=3072,
        num_hidden_layers=26,
        intermediate_size=9216,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=131072,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        **_NO_ENDS,
    ),
    "olmo-2-1b": lambda: Olmo2Config(
        hidden_size=2048,
        num_hidden_layers=16,
        intermediate_size=8192,
        num_attention_heads=16,
        vocab_size=100352,
        max_position_embeddings=4096,
        **_NO_ENDS,
    ),
    "granite-3-2b": lambda: GraniteConfig(
        hidden_size=2048,
        num_hidden_layers=40,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=49155,
        max_position_embeddings=32768,
        embedding_multiplier=12.0,
        attention_multiplier=0.015625,
        residual_multiplier=0.22,
        logits_scaling=8.0,
        tie_word_embeddings=True,
        **_NO_ENDS,
    ),
    "smollm3-3b": lambda: SmolLM3Config(
        hidden_size=2048,
        num_hidden_layers=36,
        intermediate_size=11008,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=128256,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        **_NO_ENDS,
    ),
    "phi-3-mini": lambda: Phi3Config(
        hidden_size=3072,
        num_hidden_layers=32,
        intermediate_size=8192,
        num_attention_heads=32,
        vocab_size=32064,
        max_position_embeddings=4096,
        **_NO_ENDS,
    ),
}


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(SHAPES[name](), dtype=torch.bfloat16).eval()


def measure(name: str, tokens: int, repeats: int) -> dict[str, Any]:
    model: Any = build(name)
    prompt = prompt_of(model)
    decoders: dict[str, Any] = {}
    packing = seconds(lambda: decoders.update(kernel=load_decoder(model, "native")))
    decoders["own layers"] = load_decoder(model, "hf")
    ways: dict[str, Callable[[], Any]] = {"generate": partial(their_loop, model, prompt, tokens)}
    for way, decoder in decoders.items():
        ways[way] = partial(our_loop, decoder, prompt, tokens)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for once in range(repeats + 1):
        for way, run in ways.items():
            taken = seconds(run)
            if once:  # the first round warms up
                rates[way].append(tokens / taken)
    return {
        "shape": name,
        "family": model.config.model_type,
        "parameters": sum(p.numel() for p in model.parameters()),
        "packing_seconds": packing,
        "tokens_per_second": {way: statistics.median(found) for way, found in rates.items()},
        "spread": {way: [min(found), max(found)] for way, found in rates.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}; all")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if unknown := sorted(set(args.shapes) - set(SHAPES)):
        parser.error(f"unknown shape {unknown[0]!r}; accepted: {', '.join(SHAPES)}")
    rows = []
    for name in args.shapes or SHAPES:
        rows.append(measure(name, args.tokens, args.repeats))
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        result = {
            **collect(torch.device("cpu")),
            "tokens": args.tokens,
            "repeats": args.repeats,
            "rows": rows,
        }
        args.json.write_text(json.dumps(result, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
