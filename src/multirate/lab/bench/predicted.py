"""Speedups that the cost model predicts for a run, and facts about its accelerators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from multirate.decoding.speculate.step_costs import StepCosts
from multirate.engine import Engine
from multirate.errors import UserError
from multirate.lab.bench.rows import Row
from multirate.training.checkpoint import Accelerator


def predictions(engine: Engine, rows: Sequence[Row]) -> dict[str, float]:
    """By row: the decoding speedup that follows from the measured costs of a plain step, a drafted
    level and verification, and from the run's tokens per step and mean draft depth. Leaves out rows
    without drafts, and rows without such costs.
    """
    found = {}
    for row in rows:
        if not row.acceptance or row.tokens_per_step is None:
            continue
        try:
            model = engine.costs(row.method)
        except UserError:  # a row of another engine
            continue
        if model is not None:
            depth = (row.tokens_per_step - 1) / row.acceptance
            seconds = seconds_of(model.costs, depth)
            found[row.method] = row.tokens_per_step * model.costs.plain_step / seconds
    return found


def seconds_of(costs: StepCosts, depth: float) -> float:
    """Seconds per step for a mean draft depth, by linear interpolation."""
    below = int(depth)
    low, high = costs.step_seconds(below), costs.step_seconds(below + 1)
    return low + (depth - below) * (high - low)


def trained(accelerator: Accelerator) -> dict[str, Any] | None:
    """Parameters, tokens and minutes of all its training runs, and held-out agreement of its first
    gate with the model, by draft step. None if its model card lacks these.
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
