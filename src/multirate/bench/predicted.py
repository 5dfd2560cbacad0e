"""What the cost model expects of the methods of a run, and what their accelerators are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from multirate.bench.runner import Row
from multirate.decoding.draft_length import StepCosts
from multirate.engine import Engine
from multirate.errors import UserError
from multirate.training.checkpoint import Accelerator


def predictions(engine: Engine, rows: Sequence[Row]) -> dict[str, float]:
    """By row: the speedup while decoding that measured costs of a plain step, a drafted level and
    verification give with the run's tokens per step and the mean depth of its drafts. Rows without
    drafts, or without such costs, as those in stages, are left out.
    """
    found = {}
    for row in rows:
        if not row.acceptance or row.tokens_per_step is None:
            continue
        try:
            model = None if engine.in_stages(row.method) else engine.costs(row.method)
        except UserError:  # a rival's row: no method of this engine
            continue
        if model is not None:
            depth = (row.tokens_per_step - 1) / row.acceptance
            seconds = seconds_of(model.costs, depth)
            found[row.method] = row.tokens_per_step * model.costs.plain_step / seconds
    return found


def seconds_of(costs: StepCosts, depth: float) -> float:
    """Of a step with drafts of a mean depth: linear between whole ones."""
    below = int(depth)
    low, high = costs.step_seconds(below), costs.step_seconds(below + 1)
    return low + (depth - below) * (high - low)


def trained(accelerator: Accelerator) -> dict[str, Any] | None:
    """Parameters, the tokens and minutes of all its training runs, and on held-out text the share
    of the model's own tokens among its first gate's, by draft step; None where its card says
    nothing of them.
    """
    last = accelerator.training
    runs = [*last.get("before", []), last]
    if not all("tokens" in run and "seconds" in run for run in runs):
        return None
    terms = accelerator.results.get("terms", [])
    return {
        "parameters": accelerator.parameters(),
        "tokens": sum(run["tokens"] for run in runs),
        "minutes": sum(run["seconds"] for run in runs) / 60,
        "agreement": [term["agreement"] for term in terms if term["gate"] == terms[0]["gate"]],
    }
