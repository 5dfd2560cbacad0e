"""The README.md that goes with an accelerator: what it is, how to use it, what was measured while
training it.
"""

from __future__ import annotations

from typing import Any

from multirate.methods.spec import find


def _figures(term: dict[str, Any]) -> str:
    return f"{term['agreement']} | {term['overlap']} | {term['kl']}"


def _table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| gate after layer | draft step | agreement | overlap Σ min(p, q) | KL (nats) |",
        "|---|---|---|---|---|",
    ]
    for term in results.get("terms", []):
        lines.append(f"| {term['gate']} | {term['draft_step']} | {_figures(term)} |")
    for exit_ in results.get("early_exit", {}).get("terms", []):
        lines.append(f"| {exit_['gate']} (the base's plain early exit) | – | {_figures(exit_)} |")
    return lines


def _experts_table(results: dict[str, Any]) -> list[str]:
    lines = [
        "| experts of layer | predicted so many layers before | recall | the gate's own | overlap "
        "| KL (nats) |",
        "|---|---|---|---|---|---|",
    ]
    for term, gate in zip(
        results["terms"], results.get("early_exit", {}).get("terms", []), strict=False
    ):
        lines.append(
            f"| {term['gate']} | {term['draft_step']} | {term['agreement']} | "
            f"{gate['agreement']} | {term['overlap']} | {term['kl']} |"
        )
    return lines


def _prompts(results: dict[str, Any]) -> list[str]:
    if "prompts" not in results:
        return []
    return [
        f"Answers to {results['prompts']} distinct prompts, none of which is in the training data.",
        "",
    ]


def _measured(description: dict[str, Any]) -> list[str]:
    results = description["results"]
    if not results.get("terms"):
        return []
    if find(description["method"]).role == "experts":
        return [
            "## Measured on held-out text",
            "",
            *_prompts(results),
            "Recall: share of a token's experts among the k likeliest that were predicted; the "
            "gate's own: the later layer's router on the current residual.",
            "",
            *_experts_table(results),
            "",
        ]
    simulated = results.get("simulated_tokens_per_step")
    return [
        "## Measured on held-out text",
        "",
        *_prompts(results),
        f"{results['rows']} response tokens, teacher-forced; agreement is top-1 with the full "
        "model."
        + (
            ""
            if simulated is None
            else " Simulated tokens per verify step (chain of 5, bonus token included): "
            f"**{simulated}**."
        ),
        "",
        *_table(results),
        "",
    ]


def model_card(description: dict[str, Any]) -> str:
    """Markdown of the card, from what accelerator.json holds. States nothing that was not
    measured.
    """
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
        f"{description['parameters'] / 1e6:.2f}M parameters beside the frozen base; "
        + (
            "greedy output stays the base's own."
            if find(description["method"]).lossless
            else "lossy: tokens that leave early may not be the base's own."
        ),
        "",
        "```python",
        "import multirate",
        "",
        use,
        "```",
        "",
        f"Fits one base only: {base['architecture']}, {base['num_layers']} layers, width "
        f"{base['hidden_size']}, vocabulary {base['vocab_size']}, weights fingerprint "
        f"`{base['fingerprint']}` (checked on load).",
        "",
    ]
    lines += _measured(description)
    if training:
        lines += ["## Training", ""]
        lines += [
            f"- {key.replace('_', ' ')}: {value}"
            for key, value in training.items()
            if not isinstance(value, (dict, list)) and value is not None
        ]
        lines += [
            f"- trained before: {run['tokens']:,} tokens in {run['steps']:,} steps of "
            f"{', '.join(run['data'])}"
            for run in training.get("before", [])
        ]
        if training.get("data"):
            lines.append(f"- data files: {', '.join(training['data'])}")
        if training.get("argv"):
            lines += ["", "```", " ".join(training["argv"]), "```"]
    return "\n".join(lines) + "\n"
