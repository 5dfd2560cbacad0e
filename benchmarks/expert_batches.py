"""Experts on disk with several rows a pass: batches and drafts, which need the union of their rows'
experts.

    multirate pack lab/models/mixture --out experts
    python benchmarks/expert_batches.py --experts experts --data question.jsonl \
        --expert-memory 40% \
        --json lab/results/expert_batches.json

Total tokens per second after prefill, for the mixture in lab/models. Every run and policy must give
the same text. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import multirate
from multirate.experts.named_policies import policy_named
from multirate.experts.runtime import ExpertRuntime, ExpertSettings
from multirate.lab.bench.suites import load_suite
from multirate.loading.chat_template import encode_chat
from multirate.provenance import collect

MIXTURE = Path(__file__).resolve().parent.parent / "lab/models/mixture"
BATCHES = (1, 2, 4)
POLICIES = ("on_demand", "lru", "aot", "resident")


def runs(engine: multirate.Engine, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """What is timed, by name → a function giving (the sequences in the prompts' order, seconds,
    tokens, stats).
    """
    stop = engine.stopping(tokens)

    def run(batch: int, method: str) -> tuple[list[list[int]], float, int, Any]:
        assert engine.experts is not None and engine.experts.runtime is not None
        runtime = engine.experts.runtime
        texts: list[list[int]] = []
        seconds, made = 0.0, 0
        runtime.reset()
        total = runtime.stats.copy()
        for first in range(0, len(prompts), batch):
            engine.forget()
            began: list[Any] = []

            def first_tokens(_: int, __: list[int], began: list[Any] = began) -> None:
                if not began:
                    began.append((time.perf_counter(), runtime.stats.copy()))

            part = prompts[first : first + batch]
            out = engine.generate(
                part, stop=stop, method=method, speculate="always", on_tokens=first_tokens
            )
            seconds += time.perf_counter() - began[0][0]
            made += sum(len(sequence) - 1 for sequence in out.sequences)
            total.add(runtime.stats.minus(began[0][1]))
            texts += out.sequences
        return texts, seconds, made, total

    found = {f"batch {size}": lambda size=size: run(size, "autoregressive") for size in BATCHES}
    return found | {"prompt lookup": lambda: run(1, "prompt_lookup")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="MT-Bench's questions")
    parser.add_argument("--expert-memory", default="40%", help="a share of the experts")
    parser.add_argument("--limit", type=int, default=8, help="questions")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = multirate.attach(str(MIXTURE), experts=args.experts, expert_policy="on_demand")
    offload = engine.experts
    assert offload is not None
    store = offload.store
    budget = int(float(args.expert_memory.rstrip("%")) / 100 * store.index.data_bytes)
    chosen = load_suite("mt_bench", args.data, args.limit)
    prompts = [
        encode_chat(engine.tokenizer, [{"role": "user", "content": q.turns[0]}]) for q in chosen
    ]
    runtimes = {}
    for policy in POLICIES:
        whole = policy == "resident"
        settings = ExpertSettings(
            None if whole else budget, "lru" if whole else policy_named(policy).eviction
        )
        predictor = None if whole else offload.policy_predictor(policy)
        runtimes[policy] = ExpertRuntime(store, settings, predictor)
    kinds = runs(engine, prompts, args.tokens)
    taken: dict[tuple[str, str], list[Any]] = {}
    texts = None
    for repeat in range(args.repeats + 1):  # the first warms up
        for name, run in kinds.items():
            for policy, runtime in runtimes.items():
                offload.runtime = runtime
                found, seconds, made, stats = run()
                texts = texts or found
                if found != texts:
                    raise SystemExit(f"{name} with {policy}: another text")
                if repeat:
                    taken.setdefault((name, policy), []).append((made / seconds, stats, made))
    rows = []
    for (name, policy), measured in taken.items():
        rates = [rate for rate, _, _ in measured]
        stats, made = measured[-1][1:]
        rows.append(
            {
                "run": name,
                "policy": policy,
                "tokens_per_second": statistics.median(rates),
                "spread": (max(rates) - min(rates)) / statistics.median(rates),
                "hit_rate": stats.hits / max(stats.uses, 1),
                "uses_per_token": stats.uses / made,
                "bytes_per_token": (stats.demand_bytes + stats.speculative_bytes) / made,
            }
        )
        print(
            f"{name:14} {policy:10} {rows[-1]['tokens_per_second']:7.0f} tok/s, hits "
            f"{rows[-1]['hit_rate']:.0%}, {rows[-1]['uses_per_token']:.1f} experts, "
            f"{rows[-1]['bytes_per_token'] / 1e6:.2f} MB a token"
        )
    if args.json:
        about = {
            "expert_memory_bytes": budget,
            "prompts": len(prompts),
            "tokens": args.tokens,
            "repeats": args.repeats,
        }
        content = {
            **collect("cpu"),
            "model": "reference-mixture",
            **about,
            "identical": True,
            "rows": rows,
        }
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
