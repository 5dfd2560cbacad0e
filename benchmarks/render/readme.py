"""The README's block: one table of seven rows."""

from __future__ import annotations

from render import serving
from render.common import load, processor, same_text, table, times

M2R2_OWN = "m2r2-carry:lookup=0"
ROWS = {
    "generate": ("`transformers` `generate`", "bf16"),
    "llamacpp-q4_1": ("llama.cpp", "Q4_1, the file as it is"),
    "autoregressive-bf16": ("multirate without drafts", "bf16"),
    "autoregressive": ("multirate without drafts", "Q4_1, the file as it is"),
    "sam": ("text lookup (the default)", "Q4_1"),
    M2R2_OWN: ("M2R2's drafts alone", "Q4_1"),
    "m2r2-carry": ("M2R2 + text lookup", "Q4_1"),
}
"""A row's method and weights. Its speedup comes from these and from nothing else."""


def _instructions(name: str) -> str:
    return "AVX-512" if "avx512f" in load(name)["cpu_features"] else "AVX2"


def block() -> list[str]:
    """The table, and the line under it."""
    run = load("quantised_smollm2")
    rows = {row["method"]: row for row in run["rows"]}
    lines = []
    for method, (name, weights) in ROWS.items():
        row = rows[method]
        same = same_text([row], run["prompts"]).partition(" ")[0].partition(",")[0]
        trained = run["accelerators"].get(method.split(":")[0])
        need = "no" if trained is None else f"{trained['tokens'] / 1e6:.1f}M tokens"
        cells = f"{row['tokens_per_second']:.0f}", times(row["speedup"]), need, same
        lines.append((name, weights, *cells))
    return [
        table(("method", "weights", "tokens/s", "speedup", "training", "same text"), lines),
        f"SmolLM2-135M-Instruct's Q4_1 file, {run['prompts']} MT-Bench prompts "
        f"({len(run['loops'])} more end in loops and are left out), {run['threads']} threads of an "
        f"{processor(run)}, {str(run['date'])[:10]}, greedy, up to {run['max_new_tokens']} tokens. "
        "Same text: as row 4. Reproduce: "
        "`bash lab/recipes/smollm2/quantised.sh EVAL runs/quantised`. "
        "[All results](lab/results/README.md). As a server, "
        f"{serving.over_llama('serving_load')} times "
        "[llama-server](lab/results/README.md#server-under-load) "
        f"({_instructions('serving_load')}), {serving.over_llama('serving_load_q4_0')} times with "
        f"Q4_0 ({_instructions('serving_load_q4_0')}).",
    ]
