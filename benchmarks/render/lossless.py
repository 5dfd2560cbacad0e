"""Lossless methods on MT-Bench: this engine, others, and another processor."""

from __future__ import annotations

from typing import Any

from render.common import (
    NAMES,
    OTHERS,
    PLAIN,
    Section,
    all_same,
    command,
    joined,
    label,
    load,
    per_step,
    same_text,
    setting,
    sources,
    split,
    stored_command,
    table,
    times,
)


def variants(run: dict[str, Any]) -> dict[str, dict[bool, dict[str, Any]]]:
    """The drafting rows of each method, by whether they use lookup."""
    found: dict[str, dict[bool, dict[str, Any]]] = {}
    for row in run["rows"]:
        name, settings = split(row["method"])
        if name == PLAIN or name in OTHERS or "texts" in settings:
            continue
        found.setdefault(name, {})[joined(row["method"])] = row
    return found


def engines_table(run: dict[str, Any]) -> str:
    """Other engines beside the plain loop."""
    lines = []
    for row in run["rows"]:
        name = row["method"].partition(" ")[0]
        if name in OTHERS or name == PLAIN:
            lines.append(
                (
                    NAMES[name],
                    f"{row['tokens_per_second']:.0f}",
                    times(row["speedup"]),
                    same_text([row], run["prompts"]),
                )
            )
    return table(("engine, no drafts", "tokens/s", "speedup", "same text"), lines)


def methods_table(run: dict[str, Any]) -> str:
    """A line for each method."""
    lines = []
    for name, rows in variants(run).items():
        trained = run["accelerators"].get(name)
        lines.append(
            (
                label(f"{name}:lookup=0", link=True),
                "–" if trained is None else f"{trained['parameters'] / 1e6:.1f}M",
                "none" if trained is None else f"{trained['tokens'] / 1e6:.1f}M",
                per_step(rows.get(False)),
                per_step(rows.get(True)),
            )
        )
    heads = ("method", "parameters", "training tokens", "drafts alone", "+ lookup")
    return table(heads, lines)


def lossless() -> Section:
    run = load("mt_bench_smollm2")
    rows = {row["method"]: row for row in run["rows"]}
    about = run["accelerators"]

    def speed(name: str) -> str:
        return times(rows[name]["speedup"])

    def minutes(name: str) -> str:
        return f"{about[name]['minutes']:.1f}"

    return Section(
        "Lossless decoding",
        [
            f"MT-Bench: {setting(run)} Among the trained methods' drafts alone M2R2's are fastest "
            f"({speed('m2r2-carry:lookup=0')}; EAGLE-3 {speed('eagle3')}), but M2R2 "
            f"was trained on {about['m2r2-carry']['tokens'] / 1e6:.1f}M tokens and EAGLE-3 on "
            f"{about['eagle3']['tokens'] / 1e6:.1f}M: see [equal training](#equal-training). "
            f"With lookup, M2R2 ({speed('m2r2-carry')}), EAGLE ({speed('eagle:lookup=sam')}) and "
            f"EAGLE-3 ({speed('eagle3:lookup=sam')}) are close to each other and ahead of text "
            f"lookup alone ({speed('sam')}). {all_same(run)}",
            methods_table(run),
            "The other engines in the same run. llama.cpp computes in its own formats, so its text "
            "may differ; its Q8_0 and Q4_0 files are requantised from the model's file, which is "
            "mostly Q4_1.",
            engines_table(run),
            "EVAL is a folder with the question files, ACCELERATORS one with EAGLE-3 and Hydra++ "
            "(too large to ship; `lab/recipes/smollm2/on_a_gpu.sh` trains them). Those used here "
            f"come from another, shorter run of training ({minutes('eagle3')} and "
            f"{minutes('hydra')} minutes) than those of [equal training](#equal-training).",
            command(
                "ACCELERATORS=runs/on_a_gpu bash lab/recipes/smollm2/lossless.sh "
                "EVAL runs/lossless mt_bench"
            ),
            sources("mt_bench_smollm2"),
        ],
    )


def newer_processor() -> Section:
    run = load("mt_bench_smollm2_zen5")
    speeds = {row["method"]: times(row["speedup"]) for row in run["rows"]}
    rate = next(row["tokens_per_second"] for row in run["rows"] if row["method"] == PLAIN)
    return Section(
        "A newer processor",
        [
            f"MT-Bench: {setting(run)} Zen 5 multiplies twice as fast per cycle as Zen 4. "
            "The faster a processor multiplies and the slower its memory, the larger the speedups. "
            f"{all_same(run)}",
            methods_table(run),
            f"transformers `generate` has {speeds['generate']} and llama.cpp "
            f"{speeds['llamacpp-bf16']} in BF16 and {speeds['llamacpp-q4_0']} in Q4_0, against "
            f"the plain loop's {rate:.0f} tokens/s.",
            stored_command("mt_bench_smollm2_zen5"),
            sources("mt_bench_smollm2_zen5"),
        ],
    )


def other_engines() -> Section:
    run = load("baselines_smollm2")
    lines = []
    for row in run["rows"]:
        name = row["method"].partition(" ")[0]
        if "q8_0" in name:
            continue
        ours = name not in OTHERS
        lines.append(
            (
                label(row["method"]),
                f"{row['tokens_per_second']:.0f}",
                times(row["speedup"]),
                "–" if ours and name != PLAIN else f"{row['tokens_per_step']:.2f}",
                same_text([row], run["prompts"]),
            )
        )
    return Section(
        "Speculation in other engines",
        [
            f"MT-Bench: {setting(run)} transformers' assisted generation and llama.cpp's Python "
            "package, each with the drafting it ships. Only transformers' prompt lookup is faster "
            "than its own engine's plain loop here. llama.cpp's package samples in Python when it "
            "drafts and computes the head for every row. The early-exit model was not trained for "
            "early exit. Tokens per step include the prompt's pass.",
            table(("engine", "tokens/s", "speedup", "tokens per step", "same text"), lines),
            command(
                "multirate bench smollm2 --suite mt_bench --data question.jsonl \\",
                "  --methods generate,autoregressive \\",
                "  --baselines llamacpp,assisted,assistant=lab/models/smollm2-draft \\",
                "  --limit 4 -n 96 --repeats 1 --leave-out-loops --no-tuned --json out.json",
            ),
            sources("baselines_smollm2"),
        ],
    )
