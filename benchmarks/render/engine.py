"""The plain loop: no drafts."""

from __future__ import annotations

from render.common import Section, command, load, machine, sources, table


def plain_loop() -> Section:
    names = [f"decode_loop_{size}" for size in ("110M", "340M", "1.1B")]
    shapes = [load(name) for name in names]
    lines = [
        (
            one["shape"],
            f"{one['generate_tokens_per_second']:.0f}",
            f"{one['our_tokens_per_second']:.0f} ({one['speedup_over_generate']:.1f}x)",
            f"{100 * one['share_of_roof']:.0f}%",
            *(f"{one['rows_cost'][rows]:.2f}" for rows in ("6", "8", "16")),
        )
        for one in shapes
    ]
    heads = (
        "size",
        "`generate`, tokens/s",
        "plain loop, tokens/s",
        "share of read bandwidth",
        "6 rows",
        "8 rows",
        "16 rows",
    )
    return Section(
        "Plain loop",
        [
            f"Llama shapes with random weights, batch 1, bf16, {machine(shapes[0])}. The plain "
            "loop reads weights at 80% or more of the memory's bandwidth. *Rows*: the cost of "
            "verifying that many drafted rows, in plain steps. Running M2R2's accelerated residual "
            "beside the model's own costs nothing measurable.",
            table(heads, lines),
            command("python benchmarks/decode_loop.py --shape 110M"),
            sources(*names),
        ],
    )


def families() -> Section:
    run = load("families")
    lines = []
    for row in run["rows"]:
        rates = row["tokens_per_second"]
        lines.append(
            (
                row["shape"],
                f"{row['parameters'] / 1e9:.2f}B",
                f"{rates['generate']:.1f}",
                f"{rates['own layers']:.1f}",
                f"{rates['kernel']:.1f}",
                f"{rates['kernel'] / rates['generate']:.1f}x",
                f"{row['packing_seconds']:.1f} s",
            )
        )
    heads = (
        "model size",
        "parameters",
        "`generate`",
        "plain loop, model's own layers",
        "plain loop, kernel",
        "kernel over `generate`",
        "packing",
    )
    ratios = [
        row["tokens_per_second"]["kernel"] / row["tokens_per_second"]["generate"]
        for row in run["rows"]
    ]
    return Section(
        "Other model families",
        [
            f"Plain decoding in tokens per second: random weights in published sizes, batch 1, "
            f"bf16, {run['tokens']} tokens after 32, medians of {run['repeats']} repeats, "
            f"{machine(run)}. The kernel is {min(ratios):.1f} to {max(ratios):.1f} times as fast "
            "as `generate`. *Packing* happens once when a process loads the model.",
            table(heads, lines),
            command("python benchmarks/families.py --json families.json"),
            sources("families"),
        ],
    )
