"""Time of a pass over so many rows of a prompt: with the model's own weights, and with its narrow
copy.

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

from multirate.hub import load_model
from multirate.model.load import load_decoder
from multirate.model.native import NativeDecoder
from multirate.model.rows import Rows


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
    decoders = {"own": decoder}
    if decoder.narrow() is not None:
        decoders["narrow"] = decoder.in_8_bits()
    ids = torch.randint(decoder.info.vocab_size, (max(sizes),))
    caches = {name: one.new_cache(1, max(sizes)) for name, one in decoders.items()}
    times: dict[tuple[str, int], list[float]] = {}
    with busy(args.busy):
        for number in range(args.rounds + 1):
            for size in sizes:
                for name, one in decoders.items():
                    rows = Rows.causal(0, 0, size)
                    x = one.embed(ids[:size], rows.pos)
                    begin = time.perf_counter()
                    one.layers(x, rows, 0, one.info.num_layers, caches[name])
                    if number:  # the first round warms up
                        took = 1e3 * (time.perf_counter() - begin)
                        times.setdefault((name, size), []).append(took)
    name_of, of = ("mean", statistics.mean) if args.busy else ("least", min)
    print(f"{'rows':>5}", *(f"{name:>10} {name_of:>8}" for name in decoders))
    for size in sizes:
        found = [times[name, size] for name in decoders]
        print(f"{size:5d}", *(f"{statistics.median(one):10.2f} {of(one):8.2f}" for one in found))


if __name__ == "__main__":
    main()
