"""Tokens a second beside other busy processes, by number of threads: fixed numbers, and the number
that the kernel chooses by itself.

    python benchmarks/busy_machine.py --busy 0,1,2,4

Every generation of the kernel's own choice starts without knowledge, as a new process does. The
numbers take turns; medians over repeats. Start it on a machine that is otherwise idle.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from multirate.decoding.logits import SamplingSettings
from multirate.engine import Engine, attach
from multirate.lab.bench.prompts import encode_chat
from multirate.loading.hub import load_model
from multirate.runtime.machine import cpu_name

QUESTION = [{"role": "user", "content": "Write a short story about a ship."}]
CHOSEN = 0


def tokens_per_second(
    engine: Engine, ids: list[int], threads: int, tokens: int, method: str
) -> float:
    """threads: CHOSEN: the kernel's own choice, at most torch's number."""
    decoder: Any = engine.decoder
    decoder.workspace.set_threads(threads or torch.get_num_threads(), fixed=threads != CHOSEN)
    began = time.perf_counter()
    output = engine.generate(
        [ids], SamplingSettings(), engine.stopping(tokens), method=method, speculate="always"
    )
    return len(output.sequences[0]) / (time.perf_counter() - began)


def busy_process(nice: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", f"import os\nos.nice({nice})\nwhile True: pass"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--methods", default="autoregressive,sam")
    parser.add_argument("--busy", default="0,1,2,4", help="numbers of busy processes")
    parser.add_argument("--nice", type=int, default=0, help="how nice they are")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    loaded = load_model(arguments.model)
    engine = attach(loaded)
    ids = encode_chat(loaded.tokenizer, QUESTION)
    numbers = [*range(1, torch.get_num_threads() + 1), CHOSEN]
    print(f"{cpu_name()}, {os.cpu_count()} processors, nice {arguments.nice}")
    for method in arguments.methods.split(","):
        tokens_per_second(engine, ids, CHOSEN, arguments.tokens, method)
        for busy in map(int, arguments.busy.split(",")):
            others = [busy_process(arguments.nice) for _ in range(busy)]
            try:
                time.sleep(1.0)
                seen: dict[int, list[float]] = {threads: [] for threads in numbers}
                for repeat in range(arguments.repeats):
                    for turn in range(len(numbers)):
                        threads = numbers[(repeat + turn) % len(numbers)]
                        seen[threads].append(
                            tokens_per_second(engine, ids, threads, arguments.tokens, method)
                        )
            finally:
                for process in others:
                    process.kill()
                    process.wait()
            medians = {threads: statistics.median(found) for threads, found in seen.items()}
            best = max(medians[threads] for threads in numbers if threads != CHOSEN)
            fixed = ", ".join(f"{n}: {medians[n]:.0f}" for n in numbers if n != CHOSEN)
            print(
                f"{method}, {busy} busy: tokens/s by threads {fixed}; "
                f"chosen {medians[CHOSEN]:.0f}, {medians[CHOSEN] / best:.2f}x of the best",
                flush=True,
            )


if __name__ == "__main__":
    main()
