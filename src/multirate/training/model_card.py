"""The README.md that goes with an accelerator: what it is, how to use it, what was measured while training it."""

from __future__ import annotations

from typing import Any

KIND = {
    "m2r2": "M2R2 as the paper describes it (arXiv 2502.02040; reconstructed from its text)",
    "m2r2-carry": "M2R2 with a carried final residual and an accelerated block at the gate (an extension of ours)",
    "kangaroo": "a Kangaroo adapter (arXiv 2404.18911)",
}


def _figures(term: dict[str, Any]) -> str:
    return f"{term['agreement']} | {term['overlap']} | {term['kl']}"


def _table(results: dict[str, Any]) -> list[str]:
    lines = ["| gate after layer | draft step | agreement | overlap Σ min(p, q) | KL (nats) |", "|---|---|---|---|---|"]
    for term in results.get("terms", []):
        lines.append(f"| {term['gate']} | {term['draft_step']} | {_figures(term)} |")
    for exit_ in results.get("early_exit", {}).get("terms", []):
        lines.append(f"| {exit_['gate']} (the base's plain early exit) | – | {_figures(exit_)} |")
    return lines


def model_card(description: dict[str, Any]) -> str:
    """Markdown of the card, from what accelerator.json holds. States nothing that was not measured."""
    base, training, results = description["base"], description["training"], description["results"]
    name = base.get("name") or base["architecture"]
    lines = [
        "---", "library_name: multirate", "tags: [multirate, speculative-decoding, m2r2]", "---", "",
        f"# Accelerator for {name}", "",
        f"Method `{description['method']}`: {KIND.get(description['method'], description['method'])}. "
        f"{description['parameters'] / 1e6:.2f}M parameters beside the frozen base; "
        "greedy output stays the base's own.", "",
        "```python", "import multirate", f'engine = multirate.attach(model, "this folder")  # model: {name}', "```", "",
        f"Fits one base only: {base['architecture']}, {base['num_layers']} layers, width {base['hidden_size']}, "
        f"vocabulary {base['vocab_size']}, weights fingerprint `{base['fingerprint']}` (checked on load).", "",
    ]
    if results.get("terms"):
        lines += ["## Measured on held-out text", "",
                  f"{results['rows']} response tokens, teacher-forced; agreement is top-1 with the full model. "
                  f"Simulated tokens per verify step (chain of 5, bonus token included): "
                  f"**{results['simulated_tokens_per_step']}**.", "", *_table(results), ""]
    if training:
        lines += ["## Training", ""]
        lines += [f"- {key.replace('_', ' ')}: {value}" for key, value in training.items()
                  if not isinstance(value, (dict, list)) and value is not None]
        if training.get("data"):
            lines.append(f"- data files: {', '.join(training['data'])}")
        if training.get("argv"):
            lines += ["", "```", " ".join(training["argv"]), "```"]
    return "\n".join(lines) + "\n"
