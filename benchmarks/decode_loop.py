"""The decoding loop by itself: our loop against transformers' `generate`, the bandwidth roof, and
what rows cost.

    python benchmarks/decode_loop.py --shape 110M --json lab/results/decode_loop_110M.json

Random weights of a Llama shape in bf16. Everything is interleaved in one process; medians over
repeats. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.speculate.costs import CostModel, measure_costs
from multirate.decoding.stopping import StopSettings
from multirate.methods._shared.shape import BaseShape
from multirate.methods.m2r2.config import M2R2Config
from multirate.methods.m2r2.decode import M2R2Drafter
from multirate.methods.m2r2.modules import AcceleratedStream
from multirate.provenance import collect
from multirate.runtime.decoder import Decoder
from multirate.runtime.load import load_decoder
from multirate.runtime.rows import Rows

SHAPES = {  # hidden, intermediate, layers, heads, kv heads, vocabulary
    "16M": (256, 704, 20, 4, 2, 4096),
    "110M": (768, 2048, 12, 12, 12, 32000),
    "340M": (1024, 2816, 24, 16, 16, 32000),
    "1.1B": (2048, 5632, 22, 32, 4, 32000),
}
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)


def build(shape: str) -> LlamaForCausalLM:
    d, inner, layers, heads, kv_heads, vocab = SHAPES[shape]
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=d,
                intermediate_size=inner,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                vocab_size=vocab,
                max_position_embeddings=1024,
                tie_word_embeddings=True,
                head_dim=64,
                eos_token_id=None,
                bos_token_id=None,
                pad_token_id=0,
            )
        )
    fresh = (
        LlamaForCausalLM(model.config)
        if shape != "1.1B"
        else LlamaForCausalLM(model.config).to(torch.bfloat16)
    )
    return fresh.to(torch.bfloat16).eval()


def seconds(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def prompt_of(model: Any) -> torch.Tensor:
    """32 random tokens, [1, 32]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (1, 32), generator=generator)


def our_loop(decoder: Decoder, prompt: torch.Tensor, tokens: int) -> list[int]:
    stop = StopSettings(max_new_tokens=tokens)
    return generate(decoder, PlainStep(), [prompt[0].tolist()], stop=stop).sequences[0]


@torch.no_grad()
def their_loop(model: Any, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    found: torch.Tensor = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False
    )
    return found


def read_bandwidth() -> float:
    """GB/s of summing 512 MB with all threads: what reading memory once can give."""
    block = torch.ones(1 << 26, dtype=torch.int64)
    block.sum()
    return block.nbytes / min(seconds(block.sum) for _ in range(5)) / 1e9


def round_costs(decoder: Decoder, model: LlamaForCausalLM) -> CostModel:
    """What a speculative step of m2r2-carry costs on this shape: a level of its stream (random
    weights), and
    verification.
    """
    base = BaseShape.of(model.config)
    drafter = M2R2Drafter(decoder, AcceleratedStream(M2R2Config.for_base(base, "m2r2-carry"), base))
    return measure_costs(
        decoder, drafter.start, drafter.trial_step(), budget_seconds=20.0, repeats=9
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="110M")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = build(args.shape)
    decoder = load_decoder(model)
    prompt = prompt_of(model)

    def ours() -> list[int]:
        return our_loop(decoder, prompt, args.tokens)

    def theirs() -> torch.Tensor:
        return their_loop(model, prompt, args.tokens)

    layers, d = decoder.info.num_layers, decoder.info.hidden_size
    cache = decoder.new_cache(1, 256)

    def step(rows: Rows) -> None:
        x = torch.zeros(len(rows), d)
        decoder.logits(decoder.layers(x, rows, 0, layers, cache))

    def second_stream() -> None:
        """A slow row and an accelerated row of the same token in every layer."""
        both = Rows.concat([Rows.causal(0, 100, 1), Rows.accelerated_at(0, np.array([100]))])
        decoder.layers(torch.zeros(2, d), both, 0, layers, cache)

    def one_stream() -> None:
        decoder.layers(torch.zeros(1, d), Rows.causal(0, 100, 1), 0, layers, cache)

    ours(), theirs()
    runs: dict[str, list[float]] = {"generate": [], "ours": [], "roof": []}
    for _ in range(args.repeats):
        runs["ours"].append(args.tokens / seconds(ours))
        runs["generate"].append(args.tokens / seconds(theirs))
        runs["roof"].append(read_bandwidth())
    row_runs: dict[str, list[float]] = {str(n): [] for n in ROWS} | {
        "one stream": [],
        "two streams": [],
    }
    for _ in range(4 * args.repeats):
        for n in ROWS:
            row_runs[str(n)].append(seconds(lambda n=n: step(Rows.causal(0, 100, n))))  # type: ignore[misc]
        row_runs["one stream"].append(seconds(one_stream))
        row_runs["two streams"].append(seconds(second_stream))
    costs = round_costs(decoder, model)
    medians = {name: statistics.median(values) for name, values in row_runs.items()}
    weight_bytes = sum(p.numel() for p in model.parameters()) * 2
    ours_rate, theirs_rate = statistics.median(runs["ours"]), statistics.median(runs["generate"])
    roof = statistics.median(runs["roof"])
    result = {
        **collect(torch.device("cpu")),
        "shape": args.shape,
        "parameters": sum(p.numel() for p in model.parameters()),
        "backend": type(decoder).__name__,
        "tokens": args.tokens,
        "generate_tokens_per_second": theirs_rate,
        "our_tokens_per_second": ours_rate,
        "speedup_over_generate": ours_rate / theirs_rate,
        "read_roof_gb_per_second": roof,
        "weights_gb_per_second": weight_bytes * ours_rate / 1e9,
        "share_of_roof": weight_bytes * ours_rate / 1e9 / roof,
        "step_milliseconds_by_rows": {str(n): 1e3 * medians[str(n)] for n in ROWS},
        "rows_cost": {str(n): medians[str(n)] / medians["1"] for n in ROWS},
        "second_stream_cost": medians["two streams"] / medians["one stream"],
        "m2r2_carry_round": {
            "plain_step_ms": 1e3 * costs.costs.plain_step,
            "draft_level_ms": 1e3 * costs.costs.draft_step,
            "verify_ms_by_rows": {str(n): 1e3 * t for n, t in costs.costs.verify.items()},
        },
        "projected_speedup_by_acceptance (not measured: these weights are random)": {
            str(rate): dict(zip(("chain_length", "speedup"), costs.speedup(rate), strict=True))
            for rate in (0.6, 0.7, 0.8, 0.9)
        },
        "repeats": args.repeats,
        "command": f"python benchmarks/decode_loop.py --shape {args.shape}",
    }
    print(
        json.dumps(
            {k: v for k, v in result.items() if k not in ("command",)}, indent=2, default=str
        )
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
