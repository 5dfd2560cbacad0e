"""The README's block: one table of seven rows."""

from __future__ import annotations

from render.common import load, processor, same_text, table, times

M2R2_OWN = "m2r2-carry:lookup=0"
ROWS = {
    "generate": "`transformers` `generate`",
    "llamacpp-q4_0": "llama.cpp, 4-bit weights (Q4_0)",
    "autoregressive": "multirate without drafts",
    "sam": "text lookup (the default)",
    "eagle3": "EAGLE-3's drafts alone",
    M2R2_OWN: "M2R2's drafts alone",
    "m2r2-carry": "M2R2 + text lookup",
}
"""A row's speedup comes from what its name says and from nothing else."""


def block() -> list[str]:
    """The table, and the line under it."""
    run, equal = load("mt_bench_smollm2"), load("equal_training_gpu")
    rows = {row["method"]: row for row in run["rows"]}
    lines = []
    for method, name in ROWS.items():
        row = rows[method]
        same = same_text([row], run["prompts"])
        if not row["lossless"]:
            same += " (4-bit arithmetic)"
        elif row["near_ties"]:
            same = f"{same.partition(',')[0]} (bf16 rounding)"
        trained = run["accelerators"].get(method.split(":")[0])
        need = "no" if trained is None else f"yes ({trained['tokens'] / 1e6:.1f}M tokens)"
        cells = f"{row['tokens_per_second']:.0f}", times(row["speedup"]), need, same
        lines.append((name, *cells))
    ahead = {row["method"]: times(row["speedup"]) for row in equal["rows"]}
    return [
        table(("method", "tokens/s", "speedup", "needs training", "same text as row 3"), lines),
        f"SmolLM2-135M-Instruct, {run['prompts']} MT-Bench prompts ({len(run['loops'])} more end "
        f"in loops and are left out), {run['threads']} threads of an {processor(run)}, "
        f"{str(run['date'])[:10]}, {run['dtype']} from a 4-bit file, greedy, up to "
        f"{run['max_new_tokens']} tokens. "
        "EAGLE-3 had less training here; in another run, with equal GPU time, it was ahead "
        f"({ahead['eagle3']} to {ahead[M2R2_OWN]}). "
        "Reproduce: `bash lab/recipes/smollm2/lossless.sh EVAL runs/lossless mt_bench`. "
        "[All results](lab/results/README.md).",
    ]
