"""Tables of expert loading for docs/results.md, from the committed result files alone."""

from __future__ import annotations

from typing import Any

from result_files import load, machine, table  # beside this file

NAMES = {
    "on_demand": "`on_demand`: every use a read",
    "lru": "`lru`: a cache",
    "least_stale": "`least_stale`: a cache",
    "lrfu": "`lrfu`: a cache",
    "previous_token": "+ previous token's experts",
    "popularity": "+ most used experts",
    "next_layer_gate": "+ next layer's gate",
    "accelerated": "**+ accelerated residual**",
    "aot": "**`aot`: `lrfu` + the gate, the accelerated residual or neither, as measured**",
    "oracle": "*oracle predictions*",
    "belady": "*Belady's cache*",
    "resident": "*all in memory*",
}
CACHES = ("lru", "least_stale")


def by_budget(data: dict[str, Any]) -> list[tuple[int, dict[str, dict[str, Any]]]]:
    """(bytes, rows by method) of each budget, in the order of the run."""
    groups: list[tuple[int, dict[str, dict[str, Any]]]] = []
    for row in data["rows"]:
        if not groups or row["method"] in groups[-1][1]:
            groups.append((row["expert_memory_bytes"], {}))
        groups[-1][1][row["method"]] = row
    return groups


def rates(data: dict[str, Any]) -> str:
    groups = by_budget(data)
    shares = [f"{100 * size / data['experts_bytes']:.0f}% of the experts" for size, _ in groups]
    lines = []
    for method in groups[0][1]:
        cells = []
        for _, rows in groups:
            row = rows[method]
            hits = (
                f", hits {100 * row['hit_rate']:.0f}%"
                if method not in ("on_demand", "resident")
                else ""
            )
            cells.append(f"{row['tokens_per_second']:.0f} tok/s, {row['speedup']:.2f}x{hits}")
        lines.append([NAMES.get(method, method), *cells])
    return table(["experts in memory:", *shares], lines)


def goals(data: dict[str, Any]) -> str:
    """The comparisons that the project set itself, one line each."""
    groups = by_budget(data)

    def ratio(rows: dict[str, dict[str, Any]], one: str, others: tuple[str, ...]) -> float:
        return rows[one]["tokens_per_second"] / max(
            rows[name]["tokens_per_second"] for name in others
        )

    wanted = (
        ("accelerated", ("on_demand",), "accelerated over `on_demand`", 2.9),
        ("accelerated", CACHES, "accelerated over the better of `lru` and `least_stale`", 1.25),
        ("accelerated", ("next_layer_gate",), "accelerated over the next layer's gate", 1.10),
        ("aot", CACHES, "`aot` over the better of `lru` and `least_stale`", 1.25),
        ("aot", (*CACHES, "lrfu"), "`aot` over the best cache", 0.97),
    )
    lines = []
    for one, others, text, least in wanted:
        found = [ratio(rows, one, others) for _, rows in groups]
        lines.append(
            [
                text,
                f"{least:.2f}x",
                *(f"{'**' * (v >= least)}{v:.2f}x{'**' * (v >= least)}" for v in found),
            ]
        )
    shares = [f"{100 * size / data['experts_bytes']:.0f}%" for size, _ in groups]
    return table(["", "goal", *shares], lines)


def noise(data: dict[str, Any]) -> str:
    """Where everything fits, all policies but on_demand do the same work: how far they are apart
    there.
    """
    rates = [
        row["tokens_per_second"]
        for size, rows in by_budget(data)
        if size >= data["experts_bytes"]
        for name, row in rows.items()
        if name != "on_demand"
    ]
    if not rates:
        return ""
    return (
        "Bold: reached. At 100% every policy but `on_demand` does the same work, and they are "
        f"{min(rates):.0f} to {max(rates):.0f} tok/s: so much of any difference is this shared "
        "machine's noise. What reading ahead gains here, and why not more, is in "
        "[experts.md](experts.md)."
    )


def arithmetic(data: dict[str, Any]) -> str:
    parts = []
    for size, rows in by_budget(data):
        row, slow, fast = rows["accelerated"], rows["on_demand"], rows["resident"]
        x = fast["tokens_per_second"] / slow["tokens_per_second"] - 1
        parts.append(
            f"at {100 * size / data['experts_bytes']:.0f}%: x = {x:.1f}, h = "
            f"{row['hit_rate']:.2f}, "
            f"r = {row['prefetch_recall']:.2f}, p = {min(1.0, row['prefetch_precision']):.2f}"
        )
    return "; ".join(parts)


def part(data: dict[str, Any], how: str) -> str:
    speed = data["disk_bytes_per_second"]
    disk = "the machine's own disk" if speed is None else f"a disk slowed to {speed / 1e6:.0f} MB/s"
    argv = " ".join(data["argv"])
    same = (
        "identical for every policy"
        if all(row["identical"] for row in data["rows"])
        else "**NOT IDENTICAL**"
    )
    return "\n\n".join(
        [
            f"{how}: {data['prompts']} MT-Bench prompts, {data['max_new_tokens']} new tokens at "
            f"most, {data['repeats']} repeats, {data['dtype']}, batch 1, {data['threads']} "
            f"threads of an {machine(data)}, {disk}, {data['reads']}, {str(data['date'])[:10]}; "
            f"tokens after the first; text {same}:",
            rates(data),
            goals(data),
            noise(data),
            f"Arithmetic of the accelerated residual ([experts.md](experts.md)) {arithmetic(data)}."
            f" Reproduce with `{argv}`.",
        ]
    )


def mixture() -> str:
    """The embedded mixture: every policy at every budget."""
    data = load("experts_mixture.json")
    size = (
        f"{data['experts_bytes'] / 1e6:.0f} MB of experts in {data['layers']} layers of "
        f"{data['num_experts']}"
    )
    return part(data, f"Our own trained mixture ({size}, {data['top_k']} for a token)")


def wide() -> str:
    """The same mixture with larger experts."""
    data = load("wide_experts.json")
    size = (
        f"{data['experts_bytes'] / 1e6:.0f} MB of experts, {data['record_bytes'] / 1e6:.1f} MB each"
    )
    return part(data, f"The mixture with widened experts ({size})")


def shapes() -> str:
    """What larger mixtures' layers cost."""
    data = load("expert_shapes.json")
    lines = []
    for shape in data["shapes"]:
        rates = {row["method"]: f"{row['tokens_per_second']:.1f}" for row in shape["rows"]}
        lines.append(
            [
                f"{shape['shape']}, {shape['layers']} of {shape['layers_of_the_model']} layers",
                f"{shape['top_k']} of {shape['experts']}, {shape['record_bytes'] / 1e6:.0f} MB "
                "each",
                f"{shape['compute_ms_per_layer']:.1f} ms",
                f"{shape['read_ms_per_layer']:.0f} ms",
                f"{shape['read_bytes_per_second'] / 1e9:.1f} GB/s",
                f"{shape['x']:.0f}",
                *(rates[name] for name in ("on_demand", "lru", "oracle", "resident")),
            ]
        )
    heads = (
        "shape",
        "experts",
        "a layer computes",
        "reads",
        "disk",
        "x",
        "on_demand",
        "lru",
        "oracle",
        "resident",
    )
    return "\n\n".join(
        [
            f"Tokens a second with half of the experts in memory, {data['repeats']} repeats of "
            f"{data['tokens']} tokens, "
            f"{data['threads']} threads of an {machine(data)}, {str(data['date'])[:10]}:",
            table(heads, lines),
        ]
    )


def batches() -> str:
    """Several rows a pass."""
    data = load("expert_batches.json")
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in data["rows"]:
        found.setdefault(row["run"], {})[row["policy"]] = row
    policies = list(next(iter(found.values())))
    lines = []
    for way, rows in found.items():
        cells = [f"{rows[name]['tokens_per_second']:.0f} tok/s" for name in policies]
        lru = rows["lru"]
        lines.append(
            [way, *cells, f"{lru['uses_per_token']:.0f}", f"{lru['bytes_per_token'] / 1e6:.1f} MB"]
        )
    same = "the same" if data["identical"] else "NOT THE SAME"
    return "\n\n".join(
        [
            f"{data['expert_memory_bytes'] / 1e6:.1f} MB for experts, {data['prompts']} prompts "
            f"of {data['tokens']} new tokens, {data['repeats']} repeats, {machine(data)}, "
            f"{str(data['date'])[:10]}; text {same} in all; "
            f"`{' '.join(['python', *data['argv']])}`:",
            table(("", *policies, "experts used a token", "read a token (`lru`)"), lines),
        ]
    )
