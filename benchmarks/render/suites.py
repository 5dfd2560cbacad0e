"""Other prompts, and what is published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from render.common import (
    PLAIN,
    Section,
    all_same,
    best_in_bold,
    command,
    label,
    load,
    machine,
    per_step,
    sources,
    table,
)

SUITES = {
    "suite_mt_bench_all": "MT-Bench, all",
    "suite_spec_bench": "Spec-Bench",
    "suite_gsm8k": "GSM8K",
    "suite_humaneval": "HumanEval",
    "suite_t1": "MT-Bench, temperature 1",
    "suite_b4": "MT-Bench, batch 4",
}
ALONE = (
    "sam",
    "eagle",
    "eagle3",
    "m2r2-carry:lookup=0",
    "token_recycling:lookup=sam",
    "kangaroo:lookup=sam",
    "eagle:lookup=sam",
    "eagle3:lookup=sam",
    "m2r2-carry",
)
KINDS = (
    "sam",
    "eagle3",
    "m2r2-carry:lookup=0",
    "eagle3:lookup=sam",
    "m2r2-carry",
)
PUBLISHED = {
    "eagle:lookup=sam": "2.73x (SAM-Decoding with EAGLE-2)",
    "eagle": "2.10x; EAGLE-2 2.36x",
    "eagle3": "3.02x (13B); its paper 5.58x",
    "token_recycling": "2.22x",
    "hydra": "2.07x",
    "medusa": "1.71x",
    "kangaroo": "up to 1.68x (its paper)",
    "prompt_lookup": "1.66x",
    "two_model:draft=smollm2-draft": "1.52x",
    "lookahead": "1.34x",
    "layerskip": "1.80x (Llama-3.2-1B trained for it)",
    "sam": "–",
    "sam:texts=smollm2": "1.62x to 2.36x (REST's paper, 7B, code and text)",
    "m2r2": "up to 2.8x (its abstract, MT-Bench)",
    "m2r2-carry:lookup=0": "–",
    "m2r2-carry": "–",
}
"""Spec-Bench's own table for Vicuna-7B on an A100, unless the entry names another source."""


def speeds(run: dict[str, Any]) -> dict[str, float]:
    """A run's speedups by row."""
    return {row["method"]: row["speedup"] for row in run["rows"]}


def speeds_table(runs: dict[str, dict[str, Any]], methods: Sequence[str]) -> str:
    """A line for each method and a column for each run that have any of these rows."""
    found = {title: speeds(run) for title, run in runs.items()}
    names = [name for name in methods if any(name in of for of in found.values())]
    lines = [(label(name), [of.get(name) for of in found.values()]) for name in names]
    return table(("method", *found), best_in_bold(lines))


def kinds_table(run: dict[str, Any]) -> str:
    """Speedups by kind of prompt, without the prompts' passes."""
    rates = {row["method"]: row["categories"] for row in run["rows"]}
    plain = rates[PLAIN]
    lines = [
        (label(name), [rates[name][kind] / rate for kind, rate in plain.items()]) for name in KINDS
    ]
    return table(("", *(kind.replace("_", " ") for kind in plain)), best_in_bold(lines))


def _runs(titles: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Runs by their titles, with the number of prompts."""
    runs = {title: load(name) for name, title in titles.items()}
    return {f"{title} ({run['prompts']})": run for title, run in runs.items()}


def _rates(runs: dict[str, dict[str, Any]]) -> str:
    """The plain loop's tokens per second: the range, batches apart."""
    single: list[float] = []
    batched: list[float] = []
    for run in runs.values():
        plain = next(row for row in run["rows"] if row["method"] == PLAIN)
        (batched if run["batch"] > 1 else single).append(plain["tokens_per_second"])
    return f"{min(single):.0f} to {max(single):.0f} tokens/s" + (
        f" ({batched[0]:.0f} in batches)" if batched else ""
    )


def _machines(runs: dict[str, dict[str, Any]]) -> str:
    return " and ".join(sorted({machine(run) for run in runs.values()}))


def other_suites() -> Section:
    runs = _runs(SUITES)
    return Section(
        "Other prompt suites",
        [
            f"Two threads of an {_machines(runs)}; number of prompts in brackets; loops left out; "
            "up to 256 new tokens, 96 in batches. After more training M2R2's drafts alone are "
            "ahead of EAGLE's and EAGLE-3's on every suite, within noise on Spec-Bench and in "
            "batches; text lookup alone beats all three on Spec-Bench and HumanEval. With lookup "
            "M2R2, EAGLE and EAGLE-3 are within 12% of each other on every suite, and ahead of "
            "text lookup alone. At temperature 1 every method draws the same text for a seed. The "
            "plain loop makes "
            f"{_rates(runs)}. {all_same(*runs.values())}",
            speeds_table(runs, ALONE),
            "Spec-Bench by kind of prompt, decoding only (no prompt passes):",
            kinds_table(load("suite_spec_bench")),
            command(
                "bash lab/recipes/smollm2/lossless.sh EVAL runs/lossless "
                "mt_bench_all spec_bench gsm8k humaneval t1 b4"
            ),
            sources(*SUITES),
        ],
    )


def published() -> Section:
    run = load("suite_spec_bench")
    rows = {row["method"]: row for row in run["rows"]}
    lines = [
        (label(name), per_step(rows.get(name)), there)
        for name, there in PUBLISHED.items()
        if name in rows
    ]
    return Section(
        "Published figures beside ours",
        [
            f"Spec-Bench, {machine(run)}: the run of [other prompt suites](#other-prompt-suites), "
            "with tokens per step in brackets. Published figures are Spec-Bench's own for "
            "Vicuna-7B on an A100 unless another source is named.",
            table(("method", "ours", "published"), lines),
            "Likely reasons why the order differs: on a GPU, verifying sixty rows takes as long as "
            "verifying one, so wide trees are free; here eight rows cost 1.1 to 1.4 plain steps "
            "([plain loop](#plain-loop)), so a draft has at most eleven nodes. A 135M model "
            "repeats itself more than a 7B model, which helps lookup. And our accelerators were "
            "trained for minutes of a GPU or hours of a CPU core on about 50,000 answers, EAGLE's "
            "own on 68,000 conversations.",
            sources("suite_spec_bench"),
        ],
    )
