"""Time of a pass over so many rows of a prompt.

    python benchmarks/passes.py smollm2 --rows 1,8,60,160 [--threads 2] [--busy 4]

Milliseconds: the median and the least of the rounds, in which all take turns; beside busy
processes, which --busy starts, the median and the mean. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from multirate.loading.hub import load_model
from multirate.runtime.load import load_decoder
from multirate.runtime.native import NativeDecoder
from multirate.runtime.rows import Rows


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that do nothing, as fast as they can."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,8,16,32,60,160", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--busy", type=int, default=0, help="processes beside it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = [int(size) for size in args.rows.split(",")]
    decoder = load_decoder(load_model(args.model).model, "native")
    assert isinstance(decoder, NativeDecoder)
    ids = torch.randint(decoder.info.vocab_size, (max(sizes),))
    cache = decoder.new_cache(1, max(sizes))
    times: dict[int, list[float]] = {}
    with busy(args.busy):
        for number in range(args.rounds + 1):
            for size in sizes:
                rows = Rows.causal(0, 0, size)
                x = decoder.embed(ids[:size], rows.pos)
                begin = time.perf_counter()
                decoder.layers(x, rows, 0, decoder.info.num_layers, cache)
                if number:  # the first round warms up
                    times.setdefault(size, []).append(1e3 * (time.perf_counter() - begin))
    name_of, of = ("mean", statistics.mean) if args.busy else ("least", min)
    print(f"{'rows':>5} {'median':>10} {name_of:>8}")
    for size, taken in times.items():
        print(f"{size:5d} {statistics.median(taken):10.2f} {of(taken):8.2f}")


if __name__ == "__main__":
    main()
