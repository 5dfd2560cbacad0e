"""What 1 to 16 rows of a pass cost in each weight format and on each instruction set that this
processor has.

    python benchmarks/weight_rows.py --json lab/results/weight_rows.json --picture docs/rows.svg

Layers of random blocks in the shape of a Llama of 110M parameters, all formats in turn in one
process; medians over repeats. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

from multirate.io import write_json
from multirate.provenance import collect
from multirate.runtime.native import abi, library
from multirate.runtime.native.formats import QUANTISED, WeightFormat
from multirate.runtime.native.packing import Owner
from multirate.runtime.quantised import QuantisedWeight, Weight

ROWS = (1, 2, 4, 8, 12, 16)
SHAPES = ((2304, 768), (768, 768), (4096, 768), (768, 2048))
"""Outputs and inputs of the products of a layer."""
LAYERS = 12
SETS = ("generic", "avx2", "avx_vnni", "avx512_vnni")
BF16 = "bf16"


def random_weight(kind: WeightFormat | None, outputs: int, inputs: int) -> Weight:
    """Blocks whose bits are random and whose scales are finite; None: bf16 numbers."""
    if kind is None:
        return torch.randn(outputs, inputs).to(torch.bfloat16)
    rng, quantised = np.random.default_rng(outputs), GGMLQuantizationType[kind.name]
    block, size = gguf.GGML_QUANT_SIZES[quantised]
    made = rng.integers(0, 256, (outputs, inputs // block, size), np.uint8)
    for at in (208,) if kind.name == "Q6_K" else (0, 2):
        made[:, :, at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
    return QuantisedWeight("random", quantised, (outputs, inputs), made.reshape(outputs, -1))


class Model:
    """The products of all layers, in one format."""

    def __init__(self, kind: WeightFormat | None) -> None:
        self.owner, self.workspace = Owner(), library.Workspace()
        self.workspace.set_threads(torch.get_num_threads(), fixed=True)
        self.layers = [
            self.owner.linear(random_weight(kind, *shape))
            for _ in range(LAYERS)
            for shape in SHAPES
        ]
        self.x = {shape[1]: torch.randn(max(ROWS), shape[1]) for shape in SHAPES}
        self.y = torch.empty(max(ROWS), max(layer.outputs for layer in self.layers))

    def run(self, rows: int) -> float:
        """Milliseconds of one pass."""
        kernel, y = library.kernel(), abi.tensor(self.y)
        start = time.perf_counter()
        for layer in self.layers:
            x = abi.tensor(self.x[layer.inputs])
            kernel.mr_linear(self.workspace.address, layer, x, abi.NULL, 0.0, rows, y, 0)
        return 1e3 * (time.perf_counter() - start)


def measure(repeats: int, kinds: dict[str, Model], sets: list[str]) -> dict[str, dict[str, dict]]:
    """Instruction set → format → rows → milliseconds."""
    taken: dict[tuple[str, str, int], list[float]] = {}
    for repeat in range(repeats + 1):
        for chosen in sets:
            library.kernel().mr_choose_arch(chosen.encode())
            for name, model in kinds.items():
                for rows in ROWS:
                    if name != BF16 or chosen == sets[-1]:
                        spent = model.run(rows)
                        if repeat:
                            taken.setdefault((chosen, name, rows), []).append(spent)
    found: dict[str, dict[str, dict]] = {}
    for (chosen, name, rows), times in taken.items():
        medians = found.setdefault(chosen, {}).setdefault(name, {})
        medians[str(rows)] = round(statistics.median(times), 3)
    return found


def draw(found: dict[str, dict[str, dict]], to: Path) -> None:
    """The best instruction set's curves: what a pass costs, compared with one bf16 row."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "multirate"
    from matplotlib import pyplot

    formats = list(found.values())[-1]
    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    for name in (BF16, "Q8_0", "Q6_K", "Q5_0", "Q4_K", "Q4_0"):
        costs = [formats[name][str(n)] / formats[BF16]["1"] for n in ROWS]
        axes.plot(ROWS, costs, marker="o", markersize=4, label=name)
    axes.set_xticks(ROWS)
    axes.set_xlabel("rows of a pass")
    axes.set_ylabel("time, one bf16 row = 1")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(to, metadata={"Date": None})


def main() -> None:
    """Measures, prints a table and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sets", default="avx2,avx_vnni,avx512_vnni", help="instruction sets")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    choose = library.kernel().mr_choose_arch
    sets = [name for name in options.sets.split(",") if name in SETS and choose(name.encode())]
    kinds = {kind.name: Model(kind) for kind in QUANTISED} | {BF16: Model(None)}
    found = measure(options.repeats, kinds, sets)
    for chosen, formats in found.items():
        print(f"{chosen}: ms of a pass of {', '.join(map(str, ROWS))} rows")
        for name, medians in formats.items():
            ratio = medians["8"] / medians["1"]
            print(
                f"  {name:5}", *(f"{medians[str(n)]:7.2f}" for n in ROWS), f"  8 rows {ratio:.2f}x"
            )
    if options.json:
        write_json(options.json, collect(milliseconds=found, repeats=options.repeats))
    if options.picture:
        draw(found, options.picture)


if __name__ == "__main__":
    main()
