"""The results sections of the README and of docs/experts.md, written from the committed result files alone.

    python benchmarks/readme_table.py          # rewrite them
    python benchmarks/readme_table.py --check  # exit 1 when they and the results differ
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import expert_table  # beside this file
from result_files import RESULTS, load, machine, table

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results: benchmarks/readme_table.py -->", "<!-- /results -->"
NAMES = {
    "generate": "`transformers` generate",
    "autoregressive": "**our plain loop (the baseline)**",
    "layerskip": "early exit (LayerSkip-style, no training)",
    "prompt_lookup": "prompt lookup (no training), rounds in one kernel call as ours",
    "kangaroo": "Kangaroo, {parameters:.1f}M parameters, exit after layer {gate}",
    "m2r2": "`m2r2`: the paper's ideas, {parameters:.1f}M, gate after layer {gate}",
    "m2r2-carry": "**`m2r2-carry`: ours, {parameters:.1f}M, gate after layer {gate}, with lookup**",
    "m2r2-carry:lookup=0": "`m2r2-carry` without lookup: the stream's drafts alone",
}
REFERENCE = ROOT / "src" / "multirate" / "reference"


def accelerators() -> dict[str, dict[str, Any]]:
    """The descriptions of the embedded accelerators by method."""
    paths = sorted((REFERENCE / "accelerators").glob("*/accelerator.json"))
    return {path.parent.name: json.loads(path.read_text()) for path in paths}


def display_name(method: str) -> str:
    about = accelerators().get(method.split(":")[0])
    if about is None:
        return NAMES.get(method, method)
    gate = about["config"]["gates"][0] if "gates" in about["config"] else about["config"]["exit_layer"]
    return NAMES.get(method, method).format(parameters=about["parameters"] / 1e6, gate=gate)


def reference_size() -> str:
    """Millions of parameters of the embedded model, from its weights' size (bf16)."""
    return f"{(REFERENCE / 'model' / 'model.safetensors').stat().st_size / 2e6:.0f}M"


def method_table(data: dict[str, Any]) -> str:
    lines = []
    for row in data["rows"]:
        speedup = "–" if row["speedup"] is None else f"{row['speedup']:.2f}x"
        steps = "–" if row["tokens_per_step"] is None else f"{row['tokens_per_step']:.2f}"
        same = f"{row['identical']} of {data['prompts']}"
        for kind in ("near_ties", "diverged"):
            if row[kind]:
                same += f", {row[kind]} {kind.replace('_', '-')}"
        name = display_name(row["method"])
        lines.append((name, f"{row['tokens_per_second']:.0f}", speedup, steps, same))
    return table(("method", "tokens/s", "speedup", "tokens per step", "identical"), lines)


def loop_table(shapes: list[dict[str, Any]]) -> str:
    heads = ("shape (random weights)", "generate", "our plain loop", "share of read bandwidth", "6 rows", "8 rows",
             "second stream")
    lines = []
    for s in shapes:
        rows = s["rows_cost"]
        lines.append((
            s["shape"], f"{s['generate_tokens_per_second']:.0f} tok/s",
            f"{s['our_tokens_per_second']:.0f} tok/s ({s['speedup_over_generate']:.1f}x)",
            f"{100 * s['share_of_roof']:.0f}%", f"{rows['6']:.2f}", f"{rows['8']:.2f}",
            f"{100 * (s['second_stream_cost'] - 1):+.0f}%",
        ))  # fmt: skip
    return table(heads, lines)


def training() -> str:
    """The optimizer steps of each embedded accelerator, from their own descriptions."""
    steps = {name: about["training"]["steps"] for name, about in accelerators().items()}
    return ", ".join(f"`{name}` {count}" for name, count in steps.items())


def goal(bench: dict[str, Any]) -> str:
    best = max((row["speedup"] or 0 for row in bench["rows"] if row["method"].startswith("m2r2")), default=0)
    done = "both are reached" if best >= 2.8 else "the first is reached" if best >= 2.0 else "**not reached yet**"
    return (
        f"Our goals are 2.0x and then 2.8x over our own plain loop: {done} in this run, on a shared machine."
    )


def longer_base() -> str:
    """What the same methods give on a base that was trained further, which repeats itself less."""
    longer = load("mt_bench_longer_base.json")
    found = {row["method"]: f"{row['speedup']:.2f}x" for row in longer["rows"] if row["speedup"] is not None}
    names = {"m2r2-carry": "`m2r2-carry`", "m2r2-carry:lookup=0": "without lookup", "prompt_lookup": "prompt lookup",
             "kangaroo": "Kangaroo", "m2r2": "`m2r2`"}  # fmt: skip
    said = ", ".join(f"{label} {found[name]}" for name, label in names.items() if name in found)
    return (
        "The reference model is small and repeats itself, which is easy to draft, and easier still to look up. On a "
        "base trained further by the same recipe (phases `answers` and `longer`; not committed), with accelerators of "
        f"1,600 steps, {longer['prompts']} prompts: {said} ([docs/experiments.md](docs/experiments.md))."
    )


def section() -> str:
    bench = load("mt_bench_reference.json")
    shapes = [load(f"decode_loop_{name}.json") for name in ("110M", "340M", "1.1B")
              if (RESULTS / f"decode_loop_{name}.json").exists()]
    argv = bench["argv"]
    limit = " ".join(" ".join(argv[argv.index(name) :][:2]) for name in ("--limit", "--repeats") if name in argv)
    date = str(bench.get("date", ""))[:10]
    return "\n\n".join([
        BEGIN,
        f"MT-Bench questions, embedded {reference_size()} reference model, {bench['dtype']}, batch 1, greedy, "
        f"{bench['max_new_tokens']} new tokens at most, {bench['prompts']} prompts, {bench['threads']} threads of an "
        f"{machine(bench)}, {date}:",
        method_table(bench),
        f"Training steps on the same data: {training()}. `m2r2-carry` and Kangaroo have the same size and gate layer; "
        f"Kangaroo's threshold ({accelerators()['kangaroo']['config']['threshold']}) was tuned on held-out questions "
        "(its paper's: 0.6); ours drafts by measured costs. "
        "A second turn goes on in the K/V of the first, for all of our methods. "
        f"{goal(bench)} {longer_base()} Train and run `multirate bench` on yours. "
        "Reproduce with `multirate bench --suite mt_bench --data question.jsonl --methods "
        f"{','.join(r['method'] for r in bench['rows'])} {limit} --json out.json`.",
        f"The plain loop by itself, batch 1, bf16, {machine(shapes[0])}:",
        loop_table(shapes),
        "*6 rows, 8 rows*: verifying so many drafted rows against one plain step. *Second stream*: both residual "
        "streams against one. Reproduce with `python benchmarks/decode_loop.py --shape 110M`.",
        END,
    ])


def main() -> None:
    sections = {
        "README.md": [(BEGIN, END, section()), (expert_table.BEGIN, expert_table.END, expert_table.section())],
        "docs/experts.md": [
            (expert_table.WIDE_BEGIN, expert_table.WIDE_END, expert_table.wide()),
            (expert_table.SHAPES_BEGIN, expert_table.SHAPES_END, expert_table.shapes()),
            (expert_table.BATCH_BEGIN, expert_table.BATCH_END, expert_table.batches()),
        ],
    }
    for name, parts in sections.items():
        path = ROOT / name
        text = wanted = path.read_text()
        for begin, end, made in parts:
            if begin not in text:
                raise SystemExit(f"{name} has no {begin} … {end} section")
            pattern = re.escape(begin) + r".*" + re.escape(end)
            wanted = re.sub(pattern, lambda _, made=made: made, wanted, flags=re.DOTALL)
        if "--check" not in sys.argv:
            path.write_text(wanted)
        elif wanted != text:
            raise SystemExit(f"{name} differs from benchmarks/results: run readme_table.py")


if __name__ == "__main__":
    main()
