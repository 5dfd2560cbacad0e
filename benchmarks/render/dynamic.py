"""Lossy decoding: the fastest setting at each quality, and whether a calibrated quality holds."""

from __future__ import annotations

from typing import Any

from render.common import (
    PLAIN,
    Section,
    command,
    label,
    load,
    machine,
    setting,
    sources,
    table,
    times,
)

SHOWN = 0.99, 0.95, 0.9
MOST_LOOPING = 0.05
"""As in lab/calibration/repetition.py: with more of it than plain, a row does not count."""


def frontier(run: dict[str, Any]) -> dict[str, dict[float, dict[str, Any]]]:
    """The fastest row of each lossy method at each quality, by the method's name in words."""
    plain = next(row for row in run["rows"] if row["method"] == PLAIN)
    found: dict[str, dict[float, dict[str, Any]]] = {}
    for row in run["rows"]:
        if row["lossless"] or row["repeats"] > MOST_LOOPING + plain["repeats"]:
            continue
        of = found.setdefault(label(row["method"]), {})
        for quality in SHOWN:
            best = of.get(quality)
            if row["kept"] >= quality and (best is None or row["speedup"] > best["speedup"]):
                of[quality] = row
    return found


def frontier_table(run: dict[str, Any]) -> str:
    """What each setting kept in brackets."""
    lines = [
        (
            name,
            *(
                f"{times(of[quality]['speedup'])} ({100 * of[quality]['kept']:.1f}%)"
                if quality in of
                else "–"
                for quality in SHOWN
            ),
        )
        for name, of in frontier(run).items()
    ]
    return table(("method", *(f"at least {quality:.0%}" for quality in SHOWN)), lines)


def dynamic_compute() -> Section:
    run = load("dynamic_smollm2")
    trained = run["accelerators"]
    budget = trained["lite"]["tokens"] / 1e6
    return Section(
        "Dynamic compute",
        [
            f"MT-Bench: {setting(run)} This mode is lossy. In brackets: how much it keeps, the "
            "share of an answer's tokens that the full model picks after the same text, averaged "
            "over prompts. Each cell is the fastest setting that keeps the share in its column's "
            "head without adding loops, chosen on these prompts. The methods that skip layers and "
            f"*M2R2, equal training* learned from {budget:.1f}M tokens at most, M2R2 from "
            f"{trained['m2r2-carry']['tokens'] / 1e6:.1f}M. Each method was measured at four "
            "settings.",
            frontier_table(run),
            command("bash lab/recipes/smollm2/dynamic_baselines.sh DATA runs/dynamic"),
            sources("dynamic_smollm2"),
        ],
    )


def batches() -> Section:
    run = load("batches_smollm2")
    sizes = list(dict.fromkeys(row["batch"] for row in run["rows"]))
    lines = []
    for method in dict.fromkeys(row["method"] for row in run["rows"]):
        if method in (PLAIN, "skipdecode:min_share=0.8"):
            continue
        own = {row["batch"]: row for row in run["rows"] if row["method"] == method}
        lines.append(
            (
                f"`{method}`",
                f"{100 * next(iter(own.values()))['kept']:.1f}%",
                *(times(own[size]["speedup"] if size in own else None) for size in sizes),
            )
        )
    return Section(
        "Batches",
        [
            f"{run['prompts']} MT-Bench prompts, {run['max_new_tokens']} new tokens, decoding "
            f"only, {machine(run)}. Tokens per second of all rows over plain decoding of the same "
            "batch. The accelerator is an earlier one, of 13.7M training tokens. M2R2's drafts are "
            "slower than plain decoding from batch 8 on, and its exits, row by row, from batch 4 "
            "on. For batches of 4 on Zen 4 see [other prompt suites](#other-prompt-suites).",
            table(("method", "kept", *(f"batch {size}" for size in sizes)), lines),
            command("python benchmarks/batches.py smollm2 --data question.jsonl"),
            sources("batches_smollm2"),
        ],
    )


def exit_signals() -> Section:
    """Which signal knows best that an early token is the full model's."""
    shown = {
        "top-1 probability": "top-1 probability",
        "ARLA, as trained with the stream": "ARLA",
    }
    lines = []
    runs = {"m2r2-carry": "exit_judges_smollm2", "three gates": "exit_judges_three_gates"}
    for title, name in runs.items():
        for gate, streams in load(name)["gates"].items():
            for stream, about in streams.items():
                judges = {row["judge"]: row for row in about["judges"]}
                arla = judges.get("ARLA, as trained with the stream") or judges[OWN_ARLA]
                others = [judges["top-1 probability"], arla]
                lines.append(
                    (
                        f"{title}, layer {gate}, {stream}",
                        f"{about['agreement']:.1%}",
                        *(f"{row['auc']:.3f}" for row in others),
                        *(f"{row['leaving']['0.95']:.1%}" for row in others),
                    )
                )
    one, three = (load(name) for name in runs.values())
    heads = (
        "gate and residual",
        "agreement",
        *(f"AUC, {name}" for name in shown.values()),
        *(f"exits at 95%, {name}" for name in shown.values()),
    )
    return Section(
        "Exit signals",
        [
            "Which signal says best that a token read after an early layer is the full model's: "
            "the top-1 probability or ARLA, the paper's learned estimator. *Accelerated* is M2R2's "
            "accelerated residual, *plain* the model's own at the same layer, for which ARLA is "
            "fitted anew. *Exits at 95%*: the share of tokens that can exit so that 95% of all "
            "tokens match the full model. On the accelerated residual the probability is better at "
            f"every gate. {one['texts']} answers, an earlier `m2r2-carry` of 4.5M training tokens, "
            f"{machine(one)}; three gates: {three['texts']} answers, an accelerator of 0.1M "
            f"training tokens, {machine(three)}.",
            table(heads, lines),
            command(
                "multirate answers smollm2 --questions 100 --seed 9 --out answers.jsonl",
                "python benchmarks/exit_judges.py smollm2 -a m2r2-carry --data answers.jsonl",
            ),
            sources(*runs.values()),
        ],
    )


OWN_ARLA = "ARLA, fitted here: this gate's residual"
