"""What loading experts costs at the layer shapes of larger mixtures: compute, one read, and
policies
that need no training.

    python benchmarks/expert_shapes.py --shape olmoe --folder /tmp/shapes \
        --json lab/results/expert_shapes.json

Random weights and routers, a few layers of each shape: hit rates and predictions of random routers
prove nothing, so only on_demand, lru, the oracle and resident are run, for their costs. Nothing
else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import multirate
from multirate.experts.pack import pack
from multirate.experts.runtime import ExpertSettings
from multirate.lab.bench.expert_policies import measure_policies
from multirate.lab.bench.prompts import Prompt
from multirate.provenance import collect

# hidden, expert width, experts, top k, layers here, layers of the real one, heads, kv heads
SHAPES = {
    "olmoe": (2048, 1024, 64, 8, 4, 16, 16, 16),
    "qwen3-30b-a3b": (2048, 768, 128, 8, 3, 48, 32, 4),
    "mixtral": (4096, 14336, 8, 2, 1, 32, 32, 8),
}
POLICIES = ("on_demand", "lru", "oracle", "resident")


def build(shape: str, folder: Path) -> None:
    hidden, inner, experts, top_k, layers, _, heads, kv_heads = SHAPES[shape]
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=inner,
        moe_intermediate_size=inner,
        num_experts=experts,
        num_experts_per_tok=top_k,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        norm_topk_prob=True,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Qwen3MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    model.save_pretrained(folder, max_shard_size="1GB")


def measure(shape: str, folder: Path, tokens: int, repeats: int, share: float) -> dict[str, Any]:
    place, store = folder / shape, folder / f"{shape}-experts"
    if not (place / "config.json").exists():
        build(shape, place)
    if not (store / "experts.json").exists():
        pack(place, store)
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"x": 0}, unk_token="x"))
    ).save_pretrained(place)
    engine = multirate.attach(place, experts=store, expert_policy="on_demand")
    assert engine.experts is not None
    index = engine.experts.store.index
    prompts = [Prompt(f"random {i}", list(range(10 + i, 26 + i))) for i in range(2)]
    budget = int(index.data_bytes * share)
    run = measure_policies(
        engine,
        prompts,
        POLICIES,
        [budget],
        lambda size: ExpertSettings(size),
        max_new_tokens=tokens,
        repeats=repeats,
    )
    engine.experts.remove()
    hidden, inner, experts, top_k, layers, whole, *_ = SHAPES[shape]
    rows = {row.method: row for row in run.rows}
    resident, demand = (
        1 / rows["resident"].tokens_per_second,
        1 / rows["on_demand"].tokens_per_second,
    )
    found = {
        "shape": shape,
        "hidden": hidden,
        "expert_width": inner,
        "experts": experts,
        "top_k": top_k,
        "layers": layers,
        "layers_of_the_model": whole,
        "record_bytes": index.record.bytes,
        "expert_memory_bytes": budget,
        "compute_ms_per_layer": 1e3 * resident / layers,
        "read_ms_per_layer": 1e3 * (demand - resident) / layers,
        "x": demand / resident - 1,
        "read_bytes_per_second": rows["on_demand"].bytes_per_token / (demand - resident),
        "rows": [asdict(row) for row in run.rows],
    }
    rates = ", ".join(f"{name} {row.tokens_per_second:.2f} tok/s" for name, row in rows.items())
    print(
        f"{shape}: expert {index.record.bytes / 1e6:.1f} MB; a layer computes "
        f"{found['compute_ms_per_layer']:.2f} ms, reads {found['read_ms_per_layer']:.2f} ms "
        f"({found['read_bytes_per_second'] / 1e9:.2f} GB/s): x = {found['x']:.1f}; {rates}",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", choices=SHAPES, help="repeatable; default: all")
    parser.add_argument(
        "--folder", type=Path, required=True, help="for the random models (several GB)"
    )
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.5, help="of the experts that memory holds")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    shapes = [
        measure(shape, args.folder, args.tokens, args.repeats, args.share)
        for shape in args.shape or SHAPES
    ]
    if args.json:
        content = {
            **collect("cpu"),
            "tokens": args.tokens,
            "repeats": args.repeats,
            "shapes": shapes,
        }
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
