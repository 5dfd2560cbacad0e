"""Methods after the same training, and LayerSkip on a model that was trained for it."""

from __future__ import annotations

from render.common import (
    Section,
    command,
    label,
    load,
    per_step,
    setting,
    sources,
    table,
    times,
)


def _equal(file: str) -> str:
    run = load(file)
    rows = {row["method"]: row for row in run["rows"]}
    lines = []
    for name, about in run["accelerators"].items():
        own = f"{name}:lookup=0" if f"{name}:lookup=0" in rows else name
        lines.append(
            (
                label(f"{name}:lookup=0"),
                f"{about['parameters'] / 1e6:.1f}M",
                f"{about['tokens'] / 1e6:.1f}M",
                " / ".join(f"{share:.3f}" for share in about["agreement"]),
                per_step(rows.get(own)),
                per_step(rows.get(f"{name}:lookup=sam")),
            )
        )
    heads = (
        "method",
        "parameters",
        "training tokens",
        "agreement",
        "drafts alone",
        "+ lookup",
    )
    return table(heads, lines)


def equal_training() -> Section:
    gpu, cpu = load("equal_training_gpu"), load("equal_training")
    return Section(
        "Equal training",
        [
            "Every trained method starts from nothing on the same answers of the model. "
            "*Agreement*: the share of drafted tokens that match the model on answers to 60 "
            "held-out questions, for the first, second, … drafted token. EAGLE-3 leads after equal "
            "GPU time: its drafts are right more often than M2R2's, and each of its steps is "
            "cheaper.",
            "**Equal time on a GPU.** All seven train side by side on one H200 for 283 seconds, on "
            "answers to 46,592 questions (8.1M tokens); EAGLE-3 makes 30% more training steps than "
            f"M2R2 in that time. Decoding: {setting(gpu)}",
            _equal("equal_training_gpu"),
            command("bash lab/recipes/smollm2/on_a_gpu.sh DATA runs/on_a_gpu"),
            "**Equal steps on a CPU.** 300 steps on one core, 0.56M tokens of answers to 2,730 "
            f"questions. Decoding: {setting(cpu)} After so little training M2R2's drafts are right "
            "most often, EAGLE's are fastest.",
            _equal("equal_training"),
            command("bash lab/recipes/smollm2/equal_training.sh DATA runs/equal"),
            sources("equal_training_gpu", "equal_training"),
        ],
    )


def layerskip() -> Section:
    run = load("layerskip_base")
    row = next(row for row in run["rows"] if row["method"] == "layerskip")
    return Section(
        "LayerSkip on a model trained for it",
        [
            "SmolLM2 after 50 steps of LayerSkip's training for an exit after 7 of 30 layers "
            "(0.1M tokens), which changes the model and its text. MT-Bench: "
            f"{setting(run)} LayerSkip is still slower than the plain loop: "
            f"{times(row['speedup'])}, with {100 * row['acceptance']:.0f}% of its drafts accepted "
            f"and {row['tokens_per_step']:.2f} tokens per step.",
            command(
                "python lab/recipes/tasks/tune.py --model smollm2 --data runs/equal/own.jsonl \\",
                "  --data runs/equal/train_self.jsonl --first-layer 0 --exits 7 --steps 50 \\",
                "  --threads 1 --out runs/layerskip/model",
                "multirate bench runs/layerskip/model --suite mt_bench --data question.jsonl \\",
                "  --limit 4 -n 96 --repeats 1 --no-tuned --methods autoregressive,layerskip",
            ),
            sources("layerskip_base"),
        ],
    )
