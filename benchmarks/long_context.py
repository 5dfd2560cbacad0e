"""Reading prompts of so many tokens, and decoding after them: our kernel on a GGUF file as it is
and expanded to bf16, transformers in bf16, and llama.cpp on the same file.

    python benchmarks/long_context.py smollm2 --json lab/results/long_context.json

Tokens per second, medians of rounds in which all engines take turns in one process. Nothing else
should run on the machine. llama.cpp takes part where `llama_cpp` can be imported.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from multirate.io import write_json
from multirate.loading.hub import gguf_file, load_model
from multirate.provenance import collect
from multirate.runtime.load import load_decoder
from multirate.runtime.rows import Rows

CONTEXT = 8192
DECODED = 16


class Reader(Protocol):
    """An engine with one text."""

    def read(self, ids: list[int]) -> None:
        """Starts a text with a prompt."""

    def add(self, token: int) -> int:
        """One decoding step → the likeliest next token."""


class Kernel:
    """Our kernel."""

    def __init__(self, model: str, weights: str) -> None:
        self.decoder = load_decoder(load_model(model, weights=weights).model, "native")
        self.cache: Any = None

    def read(self, ids: list[int]) -> None:
        if self.cache is not None:
            self.decoder.release_cache(self.cache)
        self.cache, self.length = self.decoder.new_cache(1, CONTEXT), len(ids)
        rows = Rows.causal(0, 0, len(ids))
        x = self.decoder.embed(torch.tensor(ids), rows.pos)
        self.decoder.layers(x, rows, 0, self.decoder.info.num_layers, self.cache)

    def add(self, token: int) -> int:
        rows = Rows.causal(0, self.length, 1)
        self.length += 1
        return self.decoder.next_tokens(rows, self.cache, [token])[1][0]


class Transformers:
    """The model's own layers."""

    def __init__(self, model: str) -> None:
        self.model = load_model(model, weights="bf16").model

    @torch.inference_mode()
    def read(self, ids: list[int]) -> None:
        self.cache = DynamicCache(config=self.model.config)
        self.model(torch.tensor([ids]), past_key_values=self.cache, logits_to_keep=1)

    @torch.inference_mode()
    def add(self, token: int) -> int:
        return int(
            self.model(torch.tensor([[token]]), past_key_values=self.cache).logits[0, -1].argmax()
        )


class LlamaCpp:
    """llama.cpp on a GGUF file."""

    def __init__(self, file: Path, threads: int) -> None:
        import llama_cpp

        self.model = llama_cpp.Llama(
            str(file), n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def read(self, ids: list[int]) -> None:
        self.model.reset()
        self.model.eval(ids)

    def add(self, token: int) -> int:
        self.model.eval([token])
        return int(self.model._ctx.get_logits()[0] > 0)


def engines(model: str, only: str) -> dict[str, Reader]:
    """The engines that take part, by name."""
    found: dict[str, Callable[[], Reader]] = {
        "file": lambda: Kernel(model, "file"),
        "bf16": lambda: Kernel(model, "bf16"),
        "transformers": lambda: Transformers(model),
    }
    file = gguf_file(model)
    try:
        import llama_cpp  # noqa: F401

        if file is not None:
            found["llamacpp"] = lambda: LlamaCpp(file, torch.get_num_threads())
    except ImportError:
        print("llama.cpp is not installed and takes no part")
    return {name: make() for name, make in found.items() if not only or name in only.split(",")}


def measure(reader: Reader, ids: list[int]) -> tuple[float, float]:
    """Tokens per second of reading, and of decoding after it."""
    start = time.perf_counter()
    reader.read(ids)
    read = time.perf_counter()
    token = 100
    for _ in range(DECODED):
        token = 100 + reader.add(token) % 1000
    return len(ids) / (read - start), DECODED / (time.perf_counter() - read)


def main() -> None:
    """Measures, prints a table and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--lengths", default="512,2048,7000", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", default="", help="comma-separated; empty: all")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    readers = engines(args.model, args.engines)
    ids = torch.randint(100, 20000, (max(lengths),)).tolist()
    taken: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for round_ in range(args.rounds + 1):
        for length in lengths:
            for name, reader in readers.items():
                speeds = measure(reader, ids[:length])
                if round_ or args.rounds == 1:
                    taken.setdefault((name, length), []).append(speeds)
    found: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'engine':>14} {'tokens':>7} {'reading':>9} {'decoding':>9}  tokens/s")
    for (name, length), speeds in taken.items():
        reading, decoding = (round(statistics.median(of), 1) for of in zip(*speeds, strict=True))
        found.setdefault(name, {})[str(length)] = {"reading": reading, "decoding": decoding}
        print(f"{name:>14} {length:7d} {reading:9.1f} {decoding:9.1f}")
    if args.json:
        write_json(args.json, collect(tokens_per_second=found, rounds=args.rounds))


if __name__ == "__main__":
    main()
