"""Two commits beside each other: tokens a second of each method on each suite, and whether the
texts are the same.

    python benchmarks/compare_commits.py HEAD~5 HEAD --suites mt_bench=FILE,gsm8k=FILE --limit 8

A commit is checked out into a temporary folder and runs in a process of its own. A path to a
checkout is accepted as well. Both answer the same prompts in turns, so a machine that changes its
speed changes it for both. A ratio is the median over prompts of the first's seconds per token over
the second's: above 1, the second is faster. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.progress import track

from multirate.io import write_json
from multirate.lab.bench.suites import load_suite
from multirate.loading.chat_template import encode_chat
from multirate.loading.hub import load_model
from multirate.runtime.machine import cpu_name

METHODS = "autoregressive,sam,m2r2-carry,m2r2-carry:lookup=0,eagle:lookup=sam,eagle"
# written for what every commit has: attach, add, generate
WORKER = """
import json, sys, time
import multirate
from multirate.loading.hub import reference_accelerators
model, weights = json.loads(sys.argv[1])
engine = multirate.attach(model, weights=weights)
for name, folder in reference_accelerators("smollm2").items():
    engine.add(folder, name)
print("ready", flush=True)
for line in sys.stdin:
    method, ids, tokens = json.loads(line)
    began = time.perf_counter()
    output = engine.generate([ids], stop=engine.stopping(tokens), method=method)
    seconds = time.perf_counter() - began
    print("answer", json.dumps([seconds, output.sequences[0]]), flush=True)
"""


class Worker:
    """A commit's engine in a process of its own. tree: the checkout."""

    def __init__(self, tree: Path, engine: list[Any]) -> None:
        self._tree = tree
        environment = os.environ | {"PYTHONPATH": str(tree / "src")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps(engine)],
            cwd=tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read("ready")

    def _read(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line[len(word) :]
        raise SystemExit(f"the process that runs {self._tree} ended with an error")

    def answer(self, method: str, ids: list[int], tokens: int) -> tuple[float, list[int]]:
        """(seconds, the new tokens)."""
        assert self._process.stdin is not None
        print(json.dumps([method, ids, tokens]), file=self._process.stdin, flush=True)
        seconds, sequence = json.loads(self._read("answer"))
        return seconds, sequence

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The commit's files, in a folder that exists while this lasts."""
    if Path(commit, "src").is_dir():
        yield Path(commit).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "worktree", "add", "-f", "--detach", folder, commit], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], check=True)


def measure(
    workers: list[Worker], prompts: list[list[int]], methods: list[str], tokens: int, repeats: int
) -> dict[str, dict[str, Any]]:
    """By method: tokens a second of both, the ratio, and how many texts are the same."""
    rows: dict[str, dict[str, Any]] = {}
    for method in methods:
        totals, ratios, same = [[0, 0.0], [0, 0.0]], [], 0
        for worker in workers:
            worker.answer(method, prompts[0], tokens)  # warms up
        for number, ids in enumerate(track(prompts * repeats, method, transient=True)):
            found: list[Any] = [None, None]
            for place in (0, 1) if number % 2 else (1, 0):
                found[place] = workers[place].answer(method, ids, tokens)
                totals[place][0] += len(found[place][1])
                totals[place][1] += found[place][0]
            (before, first), (after, second) = found
            same += first == second
            ratios.append(before / len(first) / (after / len(second)))
        rows[method] = {
            "tokens_per_second": [round(count / seconds, 1) for count, seconds in totals],
            "ratio": round(statistics.median(ratios), 3),
            "same_texts": f"{same} of {len(ratios)}",
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", help="a commit, or the path of a checkout")
    parser.add_argument("after")
    parser.add_argument("--suites", required=True, help="NAME=FILE,NAME=FILE")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="file")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--limit", type=int, default=8, help="prompts of each suite")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tokenizer = load_model("smollm2").tokenizer
    engine = [arguments.model, arguments.weights]
    suites: dict[str, Any] = {}
    with checkout(arguments.before) as before, checkout(arguments.after) as after:
        workers = [Worker(before, engine), Worker(after, engine)]
        try:
            for suite, _, path in (part.partition("=") for part in arguments.suites.split(",")):
                questions = load_suite(suite, path, arguments.limit)
                chats = [[{"role": "user", "content": found.turns[0]}] for found in questions]
                prompts = [encode_chat(tokenizer, chat) for chat in chats]
                methods = arguments.methods.split(",")
                rows = measure(workers, prompts, methods, arguments.tokens, arguments.repeats)
                suites[suite] = rows
                for method, row in rows.items():
                    print(suite, method, *row["tokens_per_second"], row["ratio"], row["same_texts"])
        finally:
            for worker in workers:
                worker.close()
    means = {}
    for method in arguments.methods.split(","):
        ratios = [rows[method]["ratio"] for rows in suites.values()]
        means[method] = round(statistics.geometric_mean(ratios), 3)
    print("mean ratio", means)
    if arguments.json:
        setting = {"cpu": cpu_name(), "before": arguments.before, "after": arguments.after}
        write_json(arguments.json, setting | {"mean_ratio": means, "suites": suites})


if __name__ == "__main__":
    main()
