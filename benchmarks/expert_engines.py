"""The expert engine in C against the one in Python: the same policy, budget and tokens, interleaved
token by token.

    python benchmarks/expert_engines.py MODEL EXPERTS --expert-memory 50% --policy lru \
        --policy oracle

Each engine has two runtimes with memory of their own, since where memory lies makes a few per cent.
Prints, for each policy, the median milliseconds of a token with both engines and the median of the
ratio of their times, token by token; logits have to be the same. Nothing else should run on the
machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import multirate
from multirate.experts.named_policies import policy_named
from multirate.experts.policies import eviction_policy
from multirate.experts.predictors import Oracle
from multirate.experts.runtime import ExpertRuntime, ExpertSettings
from multirate.loading.chat_template import encode_chat
from multirate.runtime.native.moe import NativeMoEDecoder
from multirate.runtime.rows import Rows

QUESTIONS = (
    "Tell me about a dog.",
    "What is the capital of France, and what would you see there?",
    "Write a short story about two friends who find an old map.",
    "How does a doctor treat a common cold?",
)


class Run:
    """One runtime and its cache of keys and values."""

    def __init__(self, offload: Any, runtime: ExpertRuntime) -> None:
        self.offload, self.runtime = offload, runtime
        self.decoder: NativeMoEDecoder = offload.native
        self.new_text()

    def new_text(self) -> None:
        self.cache, self.length = self.decoder.new_cache(1, 256), 0

    def feed(self, tokens: list[int]) -> tuple[torch.Tensor, float]:
        """→ the logits of the last token, and the seconds that they took."""
        self.offload.runtime = self.runtime
        rows = Rows.causal(0, self.length, len(tokens))
        began = time.perf_counter()
        x = self.decoder.embed(torch.tensor(tokens), rows.pos)
        x = self.decoder.layers(x, rows, 0, self.decoder.info.num_layers, self.cache)
        logits = self.decoder.logits(x[-1:])
        self.length += len(tokens)
        return logits, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("experts", type=Path)
    parser.add_argument("--expert-memory", default="50%")
    parser.add_argument("--policy", action="append")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--copies", type=int, default=2, help="runtimes of each engine")
    parser.add_argument(
        "--random", action="store_true", help="random prompts, for a model without a tokenizer"
    )
    args = parser.parse_args()
    engine = multirate.attach(args.model, experts=args.experts, expert_policy="on_demand")
    offload = engine.experts
    assert offload is not None and offload.native is not None
    budget = int(offload.store.index.data_bytes * float(args.expert_memory.rstrip("%")) / 100)
    if args.random:
        prompts = [list(range(10 + i, 26 + i)) for i in range(2)]
    else:
        prompts = [
            encode_chat(engine.tokenizer, [{"role": "user", "content": q}]) for q in QUESTIONS
        ]
    texts, traces = [], []
    with ExpertRuntime(offload.store) as resident:
        for prompt in prompts:
            run, resident.trace = Run(offload, resident), []
            logits, text = run.feed(prompt)[0], list(prompt)
            for _ in range(args.tokens):
                text.append(int(logits.argmax()))
                logits = run.feed(text[-1:])[0]
            texts.append(text)
            traces.append(resident.trace)
    for policy in args.policy or ["resident", "lru", "next_layer_gate", "oracle"]:
        runs: list[tuple[bool, Run]] = []
        whole = policy == "resident"
        bound = whole or policy == "oracle"
        eviction = "lrfu" if bound else policy_named(policy).eviction
        for copy in range(2 * args.copies):
            c = bool((copy + copy // 2) % 2)
            settings = ExpertSettings(None if whole else budget, eviction, kernel=c)
            predictor = None if bound else offload.policy_predictor(policy)
            runtime = ExpertRuntime(offload.store, settings, predictor, eviction_policy(eviction))
            if whole:
                runtime.preload()
            runs.append((c, Run(offload, runtime)))
        times: dict[bool, list[float]] = {True: [], False: []}
        ratios = []
        for repeat in range(args.repeats + 1):  # the first warms up
            for text, prompt, trace in zip(texts, prompts, traces, strict=True):
                for _, run in runs:
                    run.new_text()
                    if policy == "oracle":
                        run.runtime.predict_with(Oracle(trace))
                    run.feed(prompt)
                    if not repeat:
                        run.runtime.reset()
                for at in range(len(prompt), len(text)):
                    spent: dict[bool, float] = {True: 0.0, False: 0.0}
                    shown = None
                    for turn in range(len(runs)):
                        c, run = runs[(turn + at) % len(runs)]
                        logits, seconds = run.feed(text[at : at + 1])
                        assert shown is None or torch.equal(shown, logits), (
                            f"{policy}: other logits"
                        )
                        shown, spent[c] = logits, spent[c] + seconds / args.copies
                    if repeat:
                        ratios.append(spent[False] / spent[True])
                        times[True].append(spent[True])
                        times[False].append(spent[False])
        c_ms, python_ms = (1e3 * statistics.median(times[c]) for c in (True, False))
        stats = {c: run.runtime.stats for c, run in runs}
        print(
            f"{policy:16} C {c_ms:7.3f} ms, Python {python_ms:7.3f} ms, {python_ms / c_ms:.3f}x, "
            "token by token "
            f"{statistics.median(ratios):.3f}x; hits {stats[True].hits / stats[True].uses:.3f} "
            f"{stats[False].hits / stats[False].uses:.3f}, recall {stats[True].recall:.3f} "
            f"{stats[False].recall:.3f}",
            flush=True,
        )
        for _, run in runs:
            run.runtime.close()


if __name__ == "__main__":
    main()
