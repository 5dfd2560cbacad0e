"""Experts loaded from disk."""

from __future__ import annotations

from typing import Any

from render.common import Section, command, load, machine, sources, table, times

NAMES = {
    "on_demand": "`on_demand`: read at every use",
    "lru": "`lru` cache",
    "least_stale": "`least_stale` cache",
    "lrfu": "`lrfu` cache",
    "previous_token": "`lrfu` + previous token's experts",
    "popularity": "`lrfu` + most used experts",
    "next_layer_gate": "`lrfu` + next layer's router",
    "accelerated": "`lrfu` + accelerated residual",
    "aot": "`aot`: `lrfu` + the predictor measured fastest, or none",
    "oracle": "`lrfu` + perfect predictions",
    "belady": "Belady's cache (knows the future)",
    "resident": "all in memory",
}
BUDGETS = 0.2, 0.4, 0.6, 0.85
"""Shares of the experts that fit in memory, of both runs."""


def by_budget(data: dict[str, Any]) -> dict[float, dict[str, dict[str, Any]]]:
    """Rows by method, by the share of the experts that fits in memory; the rows of a budget stand
    together in a file, and `resident` has a memory of its own.
    """
    groups: list[dict[str, dict[str, Any]]] = []
    for row in data["rows"]:
        if not groups or row["method"] in groups[-1]:
            groups.append({})
        groups[-1][row["method"]] = row
    size = data["experts_bytes"]
    return {round(rows["lru"]["expert_memory_bytes"] / size, 2): rows for rows in groups}


def _rates(data: dict[str, Any]) -> str:
    """The tokens per second of on_demand at the budgets shown."""
    groups = by_budget(data)
    rates = [groups[share]["on_demand"]["tokens_per_second"] for share in BUDGETS]
    return f"{min(rates):.0f} to {max(rates):.0f}"


def _predictions(data: dict[str, Any]) -> str:
    rows = [by_budget(data)[share]["accelerated"] for share in BUDGETS]
    recall = [row["prefetch_recall"] for row in rows]
    precision = [min(1.0, row["prefetch_precision"]) for row in rows]
    return (
        f"reads ahead {min(recall):.0%} to {max(recall):.0%} of the missing experts, and "
        f"{min(precision):.0%} to {max(precision):.0%} of what it reads is used"
    )


def _noise(data: dict[str, Any]) -> float:
    """How far apart policies are where everything fits in memory and all but on_demand do the same
    work.
    """
    rates = [
        row["tokens_per_second"]
        for method, row in by_budget(data)[1.0].items()
        if method != "on_demand"
    ]
    return max(rates) / min(rates) - 1


def from_disk() -> Section:
    small, large = load("experts_mixture"), load("wide_experts")
    lines = [
        (
            name,
            *(
                times(by_budget(data)[share][method]["speedup"])
                for data in (small, large)
                for share in BUDGETS
            ),
        )
        for method, name in NAMES.items()
    ]
    heads = [f"{size}, {share:.0%}" for size in ("small", "large") for share in BUDGETS]
    same = all(row["identical"] for data in (small, large) for row in data["rows"])
    return Section(
        "Experts loaded from disk",
        [
            f"Our own trained mixture ({small['layers']} layers of {small['num_experts']} experts, "
            f"{small['top_k']} per token, {small['experts_bytes'] / 1e6:.0f} MB) and the same with "
            f"larger experts ({large['record_bytes'] / 1e6:.1f} MB each, "
            f"{large['experts_bytes'] / 1e6:.0f} MB); MT-Bench, bf16, batch 1, two threads of an "
            f"{machine(small)}, its own disk. Cells: speedup over `on_demand` ({_rates(small)} and "
            f"{_rates(large)} tokens/s) with that share of the experts in memory. Prefetching "
            "gains about 10% over the best cache at most, because the disk is already busy.",
            table(("policy", *heads), lines),
            f"The text is {'the same' if same else 'NOT THE SAME'} under every policy. The "
            f"accelerated residual {_predictions(small)} (small experts). With all experts in "
            f"memory, policies that then do the same work differ by up to {_noise(small):.0%}: "
            "read smaller differences as noise.",
            command(
                "multirate pack lab/models/mixture --out experts",
                "multirate bench lab/models/mixture --experts experts --suite mt_bench \\",
                "  --data question.jsonl --limit 6 --methods experts -n 64 --repeats 3 \\",
                "  --expert-memory 20%,40%,60%,85%",
                "# larger experts: the first lines of benchmarks/wide_experts.py",
            ),
            sources("experts_mixture", "wide_experts"),
        ],
    )


def layer_shapes() -> Section:
    data = load("expert_shapes")
    lines = []
    for shape in data["shapes"]:
        rates = {row["method"]: f"{row['tokens_per_second']:.1f}" for row in shape["rows"]}
        lines.append(
            (
                f"{shape['shape']}, {shape['layers']} of {shape['layers_of_the_model']} layers",
                f"{shape['top_k']} of {shape['experts']}, {shape['record_bytes'] / 1e6:.0f} MB",
                f"{shape['compute_ms_per_layer']:.1f} ms",
                f"{shape['read_ms_per_layer']:.0f} ms",
                f"{shape['read_bytes_per_second'] / 1e9:.1f} GB/s",
                *(rates[name] for name in ("on_demand", "lru", "oracle", "resident")),
            )
        )
    heads = (
        "shape",
        "experts",
        "compute per layer",
        "read per layer",
        "disk",
        "`on_demand`",
        "`lru`",
        "perfect predictions",
        "in memory",
    )
    return Section(
        "Layers of larger mixtures",
        [
            "What loading costs with the layers of larger models: tokens per second with half of "
            f"the experts in memory, {data['threads']} threads of an {machine(data)}. Weights and "
            "routers are random, so the hit rates do not predict those of the real models.",
            table(heads, lines),
            command(
                "python benchmarks/expert_shapes.py --shape olmoe --folder shapes "
                "--tokens 8 --repeats 2"
            ),
            sources("expert_shapes"),
        ],
    )


def batches() -> Section:
    data = load("expert_batches")
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in data["rows"]:
        found.setdefault(row["run"], {})[row["policy"]] = row
    policies = list(next(iter(found.values())))
    lines = []
    for way, rows in found.items():
        lru = rows["lru"]
        lines.append(
            (
                way,
                *(f"{rows[name]['tokens_per_second']:.0f}" for name in policies),
                f"{lru['uses_per_token']:.0f}",
                f"{lru['bytes_per_token'] / 1e6:.1f} MB",
            )
        )
    same = "the same" if data["identical"] else "NOT THE SAME"
    return Section(
        "Experts in batches and with drafts",
        [
            f"The small mixture with {data['expert_memory_bytes'] / 1e6:.1f} MB for experts, "
            f"{data['prompts']} prompts of {data['tokens']} new tokens, {machine(data)}; tokens "
            f"per second, text {same} in all. Drafts that are rejected have experts as well, so "
            "speculation reads more and is slower.",
            table(
                ("", *(f"`{name}`" for name in policies), "experts per token", "read per token"),
                lines,
            ),
            command(
                "python benchmarks/expert_batches.py --experts experts --data question.jsonl "
                "--expert-memory 40%"
            ),
            sources("expert_batches"),
        ],
    )
