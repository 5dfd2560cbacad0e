"""Methods in batches of different prompts: drafts, and tokens that leave early, row by row or for
the whole batch at once.

    python benchmarks/batches.py smollm2 --data question.jsonl \
        --json lab/results/batches_smollm2.json

Tokens a second of all rows together, prompts' passes apart, over plain decoding of the same batch.
Batches of one size are decoded by every method in turn. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import multirate
from multirate.cli.bench import method_names
from multirate.lab.bench.suites import load_suite
from multirate.lab.calibration.measure import full_model_on
from multirate.loading.chat_template import encode_chat
from multirate.methods.spec import PLAIN
from multirate.provenance import collect

METHODS = (
    "m2r2-carry,m2r2-carry:exit_thresholds=[0.8808],m2r2-carry:exit_thresholds=[0.6225],"
    "skipdecode:min_share=0.9,skipdecode:min_share=0.8,skipdecode:min_share=0.6,"
    "calm:confidence=softmax:draft_vocab=16384:decay=0.0:threshold=0.995"
)


class Total:
    """A method's work at one size of batch."""

    def __init__(self) -> None:
        self.tokens, self.steps, self.seconds = 0, 0, 0.0
        self.same, self.kept, self.answers = 0, 0.0, 0


def measure(
    engine: multirate.Engine, prompts: list[list[int]], methods: list[str], batch: int, new: int
) -> list[dict[str, Any]]:
    """A row per method. Groups of `batch` prompts, answered by every method before the next."""
    stop = engine.stopping(new)
    totals = {name: Total() for name in methods}
    groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    for number, group in enumerate([groups[0], *groups]):
        plain: list[list[int]] = []
        for name in methods:
            engine.forget()
            output = engine.generate(group, stop=stop, method=name, speculate="auto")
            plain = plain or output.sequences
            if not number:
                continue  # the first group warms up
            total, stats = totals[name], output.stats
            total.tokens += stats.tokens - stats.first_tokens
            total.steps += stats.sequence_steps
            total.seconds += stats.seconds - stats.prefill_seconds
            for prompt, ours, theirs in zip(group, output.sequences, plain, strict=True):
                verdict = full_model_on(engine.decoder, prompt, ours)
                total.kept += 1 - verdict.differing / max(1, verdict.tokens)
                total.same += ours == theirs
                total.answers += 1
    reference = totals[PLAIN]
    return [
        {
            "batch": batch,
            "method": name,
            "lossless": engine.lossless(name),
            "tokens_per_second": total.tokens / total.seconds,
            "speedup": total.tokens / total.seconds * reference.seconds / reference.tokens,
            "tokens_per_step": total.tokens / total.steps,
            "kept": total.kept / total.answers,
            "identical": total.same,
            "answers": total.answers,
        }
        for name, total in totals.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True, help="MT-Bench's question.jsonl")
    parser.add_argument("--accelerator", "-a", default="m2r2-carry")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--batches", default="1,4,8,16")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", "-n", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    engine = multirate.attach(arguments.model, arguments.accelerator)
    questions = load_suite("mt_bench", arguments.data, arguments.prompts)
    prompts = [
        encode_chat(engine.tokenizer, [{"role": "user", "content": q.turns[0]}]) for q in questions
    ]
    methods = [PLAIN, *method_names(arguments.methods)]
    rows = []
    for batch in (int(size) for size in arguments.batches.split(",")):
        for row in measure(engine, prompts, methods, batch, arguments.max_new_tokens):
            rows.append(row)
            print(
                f"batch {batch:2} {row['method'][:58]:58} {row['tokens_per_second']:6.1f} tok/s "
                f"{row['speedup']:.2f}x {row['tokens_per_step']:.2f} kept {100 * row['kept']:.1f}% "
                f"{row['identical']}/{row['answers']}",
                flush=True,
            )
    if arguments.json is not None:
        content = collect(
            engine.decoder.info.device,
            model=arguments.model,
            max_new_tokens=arguments.max_new_tokens,
            prompts=len(prompts),
            rows=rows,
        )
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
