"""What the kernel is worth to models of other families: our plain loop with it, our plain loop
through the model's own layers, and transformers' `generate`.

    python benchmarks/families.py gemma-3-270m gemma-3-1b --json lab/results/families.json

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

from multirate.provenance import collect
from multirate.runtime.load import load_decoder

_NO_ENDS: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}


def _shape(
    kind: type[PretrainedConfig],
    *,
    hidden: int,
    layers: int,
    inner: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    positions: int = 32768,
    **more: Any,
) -> Callable[[], PretrainedConfig]:
    """A published model's configuration. inner: of the MLP; more: what its family has besides."""
    return lambda: kind(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=positions,
        **_NO_ENDS,
        **more,
    )


_TIED = {"tie_word_embeddings": True}
_GEMMA3: dict[str, Any] = dict(heads=4, kv_heads=1, vocab=262144, head_dim=256, sliding_window=512)
SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "gemma-3-270m": _shape(Gemma3TextConfig, hidden=640, layers=18, inner=2048, **_GEMMA3),
    "gemma-3-1b": _shape(Gemma3TextConfig, hidden=1152, layers=26, inner=6912, **_GEMMA3),
    "ernie-4.5-0.3b": _shape(
        Ernie4_5Config,
        hidden=1024,
        layers=18,
        inner=3072,
        heads=16,
        kv_heads=2,
        vocab=103424,
        head_dim=128,
        **_TIED,
    ),
    "hunyuan-0.5b": _shape(
        HunYuanDenseV1Config,
        hidden=1024,
        layers=24,
        inner=3584,
        heads=16,
        kv_heads=8,
        vocab=120818,
        head_dim=128,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1e3, "factor": 1.0},
        **_TIED,
    ),
    "exaone-4-1.2b": _shape(
        Exaone4Config,
        hidden=2048,
        layers=30,
        inner=4096,
        heads=32,
        kv_heads=8,
        vocab=102400,
        sliding_window=None,
        layer_types=["full_attention"] * 30,
        **_TIED,
    ),
    "ministral-3-3b": _shape(
        Ministral3Config,
        hidden=3072,
        layers=26,
        inner=9216,
        heads=32,
        kv_heads=8,
        vocab=131072,
        head_dim=128,
        **_TIED,
    ),
    "olmo-2-1b": _shape(
        Olmo2Config,
        hidden=2048,
        layers=16,
        inner=8192,
        heads=16,
        kv_heads=16,
        vocab=100352,
        positions=4096,
    ),
    "granite-3-2b": _shape(
        GraniteConfig,
        hidden=2048,
        layers=40,
        inner=8192,
        heads=32,
        kv_heads=8,
        vocab=49155,
        embedding_multiplier=12.0,
        attention_multiplier=0.015625,
        residual_multiplier=0.22,
        logits_scaling=8.0,
        **_TIED,
    ),
    "smollm3-3b": _shape(
        SmolLM3Config,
        hidden=2048,
        layers=36,
        inner=11008,
        heads=16,
        kv_heads=4,
        vocab=128256,
        **_TIED,
    ),
    "phi-3-mini": _shape(
        Phi3Config,
        hidden=3072,
        layers=32,
        inner=8192,
        heads=32,
        kv_heads=32,
        vocab=32064,
        positions=4096,
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
