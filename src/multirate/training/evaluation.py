"""What trained modules measure on held-out samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator as Launcher

from multirate.methods._shared.objective import Report, Summary
from multirate.methods._shared.teacher import Known
from multirate.training.data import Batch, BatchPlan, Sample


@torch.no_grad()
def evaluate(
    objective: Any,
    heldout: Sequence[Sample],
    tokens_per_batch: int,
    launcher: Launcher,
    known_of: Callable[[Batch], Known | None] = lambda _: None,
) -> dict[str, Any]:
    """The "results" of a model card: ``objective`` (its modules in eval mode) over ``heldout``, by
    all processes. known_of: the base's stored output for a batch, if any.
    """
    world, rank, device = launcher.num_processes, launcher.process_index, launcher.device
    plan = BatchPlan(heldout, tokens_per_batch, 0)
    trained = Summary.empty(objective.terms, objective.has_arla)
    exits: Summary | None = None
    mine = range(rank, len(plan.epoch(0)), world)
    for _, batch in zip(mine, plan.batches(rank, world), strict=False):
        ids, mask = batch.ids.to(device), batch.mask.to(device)
        known = known_of(batch)
        known = None if known is None else known.to(device)
        _, report = objective(ids, mask, known)
        trained.add(report.sums())
        if objective.has_early_exit:
            terms, exit_ = objective.early_exit(ids, mask, known)
            exits = exits or Summary.empty(terms)
            exits.add(Report(terms, exit_, 0.0).sums())
    if objective.has_early_exit and exits is None:  # a process without a batch of its own
        exits = Summary.empty([term for term in objective.terms if term.step == 1])
    summaries = [trained] if exits is None else [trained, exits]
    if world > 1:
        for summary in summaries:
            summary.sums = launcher.reduce(summary.sums.to(device)).cpu()
    results = {**trained.to_json(), "prompts": len({s.prompt for s in heldout})}
    if exits is not None:
        plain = exits.to_json()
        results["early_exit"] = {
            name: plain[name] for name in ("terms", "simulated_tokens_per_step")
        }
    if objective.predicts != "drafts":
        for figures in (results, results.get("early_exit", {})):
            figures.pop("simulated_tokens_per_step", None)
    return results
