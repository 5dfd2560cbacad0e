"""Lossy decoding: the fastest setting at each quality, and whether a calibrated quality holds."""

from __future__ import annotations

from typing import Any

from render.common import (
    NAMES,
    PLAIN,
    Section,
    best_in_bold,
    command,
    joined,
    label,
    load,
    machine,
    processor,
    setting,
    sources,
    stored_command,
    table,
    times,
)

SHOWN = 0.99, 0.95
Best = dict[float, dict[str, Any]]


def frontier(run: dict[str, Any]) -> dict[str, Best]:
    """The fastest setting of each method at each quality, by the method's name in words."""
    found: dict[str, Best] = {}
    for best in run["frontier"]:
        lookup = "sam" if joined(best["setting"]) else "0"
        name = label(f"{best['method']}:lookup={lookup}")
        found.setdefault(name, {})[best["quality"]] = best
    return found


def frontier_table(run: dict[str, Any]) -> str:
    """What each setting kept in brackets."""
    lines = []
    for name, found in frontier(run).items():
        if name == NAMES[PLAIN]:
            continue
        cells = [
            f"{times(found[quality]['speedup'])} ({100 * found[quality]['kept']:.1f}%)"
            if quality in found
            else "–"
            for quality in SHOWN
        ]
        lines.append((name, *cells))
    return table(("method", *(f"at least {quality:.0%}" for quality in SHOWN)), lines)


def columns_table(runs: dict[str, dict[str, Any]], qualities: tuple[float, ...]) -> str:
    """A column for each run and quality; methods of any run."""
    fronts = {title: frontier(run) for title, run in runs.items()}
    names = dict.fromkeys(
        name for front in fronts.values() for name in front if name != NAMES[PLAIN]
    )
    lines = [
        (
            name,
            [
                front[name][quality]["speedup"] if quality in front.get(name, {}) else None
                for front in fronts.values()
                for quality in qualities
            ],
        )
        for name in names
    ]
    heads = [f"{title}, {quality:.0%}" for title in runs for quality in qualities]
    return table(("method", *heads), best_in_bold(lines))


def dynamic_compute() -> Section:
    run, equal = load("margin_long_smollm2"), load("dynamic_smollm2")
    short, newer = load("margin_smollm2"), load("margin_smollm2_zen5")
    trained = run["accelerators"]
    exits = [about["tokens"] / 1e6 for name, about in trained.items() if name in EXIT_METHODS]
    budget = equal["accelerators"]["lite"]["tokens"] / 1e6
    return Section(
        "Dynamic compute",
        [
            f"MT-Bench: {setting(run)} This mode is lossy. In brackets: how much it keeps, the "
            "share of an answer's tokens that the full model picks after the same text, averaged "
            "over prompts. Each cell is the fastest setting that keeps the share in its column's "
            "head without adding loops, chosen on these prompts. "
            "The drafting rows verify with the quantised copy; where the copy's two best logits "
            "are close (`margin`), the full-precision weights decide. Below 98% only M2R2 gets "
            "faster, because it can emit confident drafts unverified.",
            frontier_table(run),
            "The methods that skip layers had "
            f"{min(exits):.1f} to {max(exits):.1f}M training tokens here, M2R2 "
            f"{trained['m2r2-carry']['tokens'] / 1e6:.1f}M. The `sam` row is lossless. Most "
            "settings in the second column, and all that skip layers, also read prompts with the "
            "quantised copy. No setting that keeps 90% is faster than the second column's. This "
            "prints the command:",
            stored_command("margin_long_smollm2"),
            f"**Equal training.** MT-Bench: {setting(equal)} Here the methods that skip layers and "
            f"*M2R2, equal training* all learned from {budget:.1f}M tokens at most. No method "
            "that skips layers is as fast as text lookup alone, which is lossless.",
            frontier_table(equal),
            command("bash lab/recipes/smollm2/dynamic_rivals.sh DATA runs/dynamic"),
            "**Shorter answers and a newer processor.** 24 prompts, up to "
            f"{short['max_new_tokens']} new tokens, on {machine(short)}, and {machine(newer)}. "
            "Shorter answers gain less, because drafting does not speed up prefill. Accelerators: "
            f"{_tokens(short)}; on Zen 5 earlier ones: {_tokens(newer)}.",
            columns_table({processor(one)[-6:-1]: one for one in (short, newer)}, (0.99, 0.9)),
            sources(
                "margin_long_smollm2", "dynamic_smollm2", "margin_smollm2", "margin_smollm2_zen5"
            ),
        ],
    )


def _tokens(run: dict[str, Any]) -> str:
    """What a run's accelerators were trained on."""
    return ", ".join(
        f"{NAMES[name]} {about['tokens'] / 1e6:.1f}M tokens"
        for name, about in run["accelerators"].items()
    )


EXIT_METHODS = ("lite", "calm-classifier", "deed", "free", "specee", "mixture_of_depths")
TASKS = {"task_wikisql": "WikiSQL", "task_e2e_nlg": "E2E", "task_dialogsum": "DialogSum"}


def task_scores() -> Section:
    runs = {title: load(name) for name, title in TASKS.items()}
    told = []
    for title, run in runs.items():
        scores = next(row["scores"] for row in run["rows"] if row["method"] == "autoregressive")
        shown = ", ".join(f"{name} {value:.3g}" for name, value in scores.items())
        told.append(f"{title} ({run['prompts']} documents): {shown}")
    machines = " and ".join(sorted({machine(run) for run in runs.values()}))
    return Section(
        "Task scores",
        [
            "SmolLM2 fine-tuned with LoRA on three tasks, accelerators trained for 130 seconds of "
            "an H200 (M2R2's and EAGLE's start from the shipped ones, the others from nothing). "
            f"Two threads of an {machines}. Each cell is the speedup of the fastest setting that "
            "keeps that share of the full model's score, chosen on these documents. EAGLE leads in "
            "most columns, M2R2 is second, and both are ahead of every method that skips layers. "
            "Their rows include text lookup and the quantised copy. The sets are small: one "
            "WikiSQL document moves the score by 4%.",
            columns_table(runs, (0.99, 0.95)),
            f"Scores of the full model: {'; '.join(told)}.",
            command(
                "bash lab/recipes/tasks/on_a_gpu.sh DATA runs/tasks",
                "bash lab/recipes/tasks/compare.sh DATA runs/tasks",
            ),
            sources(*TASKS),
        ],
    )


def calibrated() -> Section:
    run = load("promises_smollm2")
    names = {"self.jsonl": "the model's own questions", "question.jsonl": "Spec-Bench"}
    lines = [
        (
            names[row["data"]],
            f"{100 * row['quality']:g}%",
            f"{row['draws_kept']}/{row['draws']}",
            f"{100 * row['mean']:.1f}%",
            f"{100 * min(row['kept']):.1f}%",
        )
        for row in run["rows"]
    ]
    first = run["rows"][0]
    return Section(
        "Calibrated quality on new prompts",
        [
            "Whether the quality targets stored by `multirate calibrate` "
            f"({first['confidence']:.0%} confidence) hold on prompts outside the calibration set: "
            f"{first['draws']} draws of {first['size']} prompts, {machine(run)}. At least 19 of 20 "
            "draws reach each target.",
            table(("prompts", "target", "draws that reach it", "kept", "worst draw"), lines),
            command(
                "multirate answers smollm2 --questions 520 --seed 9191 --out self.jsonl",
                "# lines 1 to 330 calibrate; ask the others, as later.jsonl",
                "tail -n +331 self.jsonl > later.jsonl",
                "python benchmarks/promises.py smollm2 --data later.jsonl \\",
                f"  --data spec_bench=question.jsonl --size {first['size']}",
            ),
            sources("promises_smollm2"),
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
                f"{100 * own[1]['kept']:.1f}%",
                *(times(own[size]["speedup"]) for size in sizes),
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
