"""A bench run as a table that fits in 80 columns, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from multirate.bench.runner import Row, baseline
from multirate.methods.spec import PLAIN


def table(rows: Sequence[Row], title: str | None = None) -> Table:
    """The rows for a terminal. A row whose answers are not the base model's shows no speedup."""
    against = baseline(rows)
    result = Table(
        title=title,
        title_justify="left",
        caption=_caption(rows, against),
        caption_justify="left",
        pad_edge=False,
    )
    longest = max((len(row.method) for row in rows), default=0)
    result.add_column("method", overflow="fold", min_width=min(longest, 14), max_width=16)
    for heading in ("tok/s", "speedup", "spread", "tok/step", "accept", "identical"):
        result.add_column(heading, justify="right")
    for row in rows:
        result.add_row(
            row.method if row.lossless else f"{row.method} (lossy)",
            f"{row.tokens_per_second:.1f}",
            "refused" if row.speedup is None else f"{row.speedup:.2f}x",
            f"{100 * row.spread:.0f}%",
            "-" if row.tokens_per_step is None else f"{row.tokens_per_step:.2f}",
            "-" if row.acceptance is None else f"{100 * row.acceptance:.0f}%",
            identity(row),
        )
    return result


def score_table(rows: Sequence[Row]) -> Table:
    """The scores of rows on a task."""
    result = Table(title="Scores", title_justify="left", pad_edge=False)
    result.add_column("method", overflow="fold", max_width=40)
    metrics = list(dict.fromkeys(metric for row in rows for metric in row.scores))
    for metric in metrics:
        result.add_column(metric, justify="right")
    for row in rows:
        cells = (row.scores.get(metric) for metric in metrics)
        result.add_row(row.method, *("-" if cell is None else f"{cell:.4g}" for cell in cells))
    return result


def identity(row: Row) -> str:
    """`yes`, or how many answers are (`78/80`), with near-ties and wrong answers on lines of their
    own.
    """
    total = row.identical + row.near_ties + row.diverged
    if row.lossless and row.identical == total:
        return "yes"
    if not row.lossless:
        parts = [f"{row.identical} same"]
        if row.kept is not None:
            parts.append(f"{100 * row.kept:.2f}% kept")
        if row.perplexity is not None:
            parts.append(f"perplexity {row.perplexity:.2f}")
        if row.repeats >= 0.005:
            parts.append(f"{100 * row.repeats:.0f}% repeats")
        if row.score_kept is not None:
            parts.append(f"{100 * row.score_kept:.1f}% of score")
        return "\n".join(parts)
    parts = [f"{row.identical}/{total}"]
    if row.near_ties:
        parts.append(f"{row.near_ties} near-tie" + "s" * (row.near_ties > 1))
    if row.diverged:
        parts.append(f"{row.diverged} WRONG")
    return "\n".join(parts)


def _caption(rows: Sequence[Row], against: Row | None) -> str:
    if against is None:
        return "No speedups: there is no correct baseline in this run."
    lines = [
        f"Speedup: total tokens over total time, against {against.method} (the faster baseline)."
    ]
    wrong = [row.method for row in rows if row.diverged]
    if wrong:
        lines.append(f"No speedup for {', '.join(wrong)}: answers are missing, shortened or wrong.")
    lines += [f"{row.method}: {row.note}" for row in rows if row.note is not None]
    return "\n".join(lines)


def bandwidth_line(read: float, share: float | None) -> str:
    """What the machine reads at most, and what of it plain decoding uses."""
    line = f"Read bandwidth: {read / 1e9:.1f} GB/s"
    if share is not None:
        line += f"; {100 * share:.0f}% of it are the weights that {PLAIN} reads, prefill apart"
    return line + "."


def document(provenance: dict[str, Any], rows: Sequence[Row], **settings: Any) -> dict[str, Any]:
    """The JSON of a run: provenance and settings at the top level, then `baseline` and `rows`."""
    against = baseline(rows)
    return {
        **provenance,
        **settings,
        "baseline": None if against is None else against.method,
        "rows": [row.as_dict() for row in rows],
    }
