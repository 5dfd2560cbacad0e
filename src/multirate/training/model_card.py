"""Writes the model card (README.md) of an accelerator: what it is, how to use it, what was measured
and how it was trained. Everything in it comes from accelerator.json, so it can be written again.
"""

from __future__ import annotations

from typing import Any

from multirate.methods.spec import find


def _figures(term: dict[str, Any]) -> str:
    return f"{term['agreement']:.3f} | {term['overlap']:.3f} | {term['kl']:.2f}"


def _table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| exit after layer | draft step | agreement | overlap Σ min(p, q) | KL (nats) |",
        "|---|---|---|---|---|",
    ]
    for term in results.get("terms", []):
        lines.append(f"| {term['gate']} | {term['draft_step']} | {_figures(term)} |")
    for exit_ in results.get("early_exit", {}).get("terms", []):
        lines.append(
            f"| {exit_['gate']} (early exit of the base model, untrained) | – | {_figures(exit_)} |"
        )
    return lines


def _experts_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| experts of layer | layers ahead | recall | next layer's router | overlap | KL (nats) |",
        "|---|---|---|---|---|---|",
    ]
    for term, gate in zip(
        results["terms"], results.get("early_exit", {}).get("terms", []), strict=False
    ):
        lines.append(
            f"| {term['gate']} | {term['draft_step']} | {term['agreement']:.3f} | "
            f"{gate['agreement']:.3f} | {term['overlap']:.3f} | {term['kl']:.3f} |"
        )
    return lines


def _prompts(results: dict[str, Any]) -> list[str]:
    if "prompts" not in results:
        return []
    return [
        f"Measured on answers to {results['prompts']} prompts that are not in the training data.",
        "",
    ]


def _measured(description: dict[str, Any]) -> list[str]:
    results = description["results"]
    if not results.get("terms"):
        return []
    if find(description["method"]).role == "experts":
        return [
            "## Results on held-out text",
            "",
            *_prompts(results),
            "Recall: the share of a token's experts that were among the k predicted ones. Next "
            "layer's router: the recall of that layer's own router on the current residual.",
            "",
            *_experts_table(results),
            "",
        ]
    simulated = results.get("simulated_tokens_per_step")
    return [
        "## Results on held-out text",
        "",
        *_prompts(results),
        f"{results['rows']:,} answer tokens with teacher forcing. Agreement: how often the draft's "
        "most likely token is the full model's."
        + (
            ""
            if simulated is None
            else " Simulated tokens per step (chains of 5, the bonus token included): "
            f"**{simulated:.2f}**."
        ),
        "",
        *_table(results),
        "",
    ]


def _training(training: dict[str, Any]) -> list[str]:
    """All runs, the first one first: a short last run must not hide what the others did."""
    runs = [*training.get("before", []), training]
    lines = ["## Training", ""]
    if all("tokens" in run and "steps" in run for run in runs):
        steps, tokens = (sum(run[name] for run in runs) for name in ("steps", "tokens"))
        count = (
            "One run" if len(runs) == 1 else f"{len(runs)} runs, each starting from the one before"
        )
        lines += [f"{count}: {tokens:,} tokens in {steps:,} steps.", ""]
        lines += [
            "| run | data | samples | steps | tokens | seconds |",
            "|---|---|---|---|---|---|",
        ]
        lines += [*_rows(runs), ""]
    lines += [f"- {note}" for run in runs for note in run.get("notes", [])]
    lines += [
        f"- {label}: {_figure(training[name])}"
        for name, label in _FIELDS.items()
        if training.get(name) is not None
    ]
    if training.get("processes", 1) > 1:
        lines.append(f"- processes: {training['processes']}")
    with_seed = training.get("settings", {}).get("seed")
    lines += [] if with_seed is None else [f"- seed: {with_seed}"]
    versions = [f"{name} {training[name]}" for name in _VERSIONS if training.get(name)]
    lines += [f"- versions: {', '.join(versions)}"] if versions else []
    commands = [" ".join(map(str, run["argv"])) for run in runs if run.get("argv")]
    return [*lines, "", "```", *commands, "```"] if commands else lines


def _figure(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


_FIELDS = {
    "distinct_prompts": "distinct prompts",
    "heldout_prompts": "held-out prompts",
    "data_sha256": "sha256 of the training data",
}
_VERSIONS = ("multirate", "torch", "transformers", "python")


def _rows(runs: list[dict[str, Any]]) -> list[str]:
    """One row per run; of more than two, those before the last share a row."""
    if len(runs) <= 2:
        return [f"| {number} | {_row(run)} |" for number, run in enumerate(runs, start=1)]
    sums = {name: sum(run.get(name, 0) for run in runs[:-1]) for name in _SUMMED}
    together = _row({"data": ["several files"], **sums})
    return [f"| 1–{len(runs) - 1} | {together} |", f"| {len(runs)} | {_row(runs[-1])} |"]


_SUMMED = ("steps", "tokens", "seconds")


def _row(run: dict[str, Any]) -> str:
    samples, seconds = (f"{run[n]:,}" if n in run else "–" for n in ("samples", "seconds"))
    data = ", ".join(run.get("data", [])) or "–"
    return f"{data} | {samples} | {run['steps']:,} | {run['tokens']:,} | {seconds}"


def model_card(description: dict[str, Any]) -> str:
    """The card in Markdown, from the content of accelerator.json."""
    base, training = description["base"], description["training"]
    name = base.get("name") or base["architecture"]
    use = f'engine = multirate.attach(model, "this folder")  # model: {name}'
    if find(description["method"]).role == "experts":
        use = (
            f'engine = multirate.attach("{name}", experts="its store", expert_predictor="this '
            'folder")'
        )
    lines = [
        "---",
        "library_name: multirate",
        "tags: [multirate, speculative-decoding]",
        "---",
        "",
        f"# Accelerator for {name}",
        "",
        f"Method `{description['method']}`: {find(description['method']).title}. "
        f"It adds {description['parameters'] / 1e6:.2f}M parameters to the frozen base model. "
        + (
            "Greedy output stays that of the base model."
            if find(description["method"]).lossless
            else "It is lossy: output may differ from that of the base model."
        ),
        "",
        "```python",
        "import multirate",
        "",
        use,
        "```",
        "",
        f"It works with one base model only: {base['architecture']}, {base['num_layers']} layers, "
        f"width {base['hidden_size']}, vocabulary {base['vocab_size']}, weights fingerprint "
        f"`{base['fingerprint']}` (checked on load).",
        "",
    ]
    lines += _measured(description)
    if training:
        lines += _training(training)
    return "\n".join(lines) + "\n"
