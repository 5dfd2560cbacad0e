"""An evaluation's scores as a table."""

from __future__ import annotations

from rich.table import Table

from multirate.lab.evaluation.run import Evaluation


def table(evaluation: Evaluation, title: str) -> Table:
    """A line per task and metric; ↑: higher is better, ↓: lower."""
    result = Table(title=title, title_justify="left", pad_edge=False)
    result.add_column("task", overflow="fold")
    result.add_column("metric", overflow="fold")
    for name in ("score", "± std. error", "samples"):
        result.add_column(name, justify="right")
    before = None
    for score in evaluation.scores:
        direction = {True: " ↑", False: " ↓", None: ""}
        result.add_row(
            score.task if score.task != before else "",
            score.metric + direction[score.higher_is_better],
            f"{score.value:.4f}",
            "-" if score.error is None else f"{score.error:.4f}",
            str(score.samples),
        )
        before = score.task
    return result
