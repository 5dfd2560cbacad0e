"""A bench run as a table of at most 80 columns, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from multirate.lab.bench.rows import Row, reference_row
from multirate.methods.spec import PLAIN


def table(rows: Sequence[Row], title: str | None = None) -> Table:
    """The rows for a terminal. A row with wrong answers shows no speedup."""
    against = reference_row(rows)
    result = Table(
        title=title,
        title_justify="left",
        caption=_caption(rows, against),
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    longest = max((len(row.method) for row in rows), default=0)
    result.add_column("method", overflow="fold", min_width=min(longest, 14), max_width=18)
    for heading in ("tokens/s", "speedup", "spread", "tokens\nper pass", "accepted", "same text"):
        result.add_column(heading, justify="right")
    for row in rows:
        result.add_row(
            row.method if row.lossless else f"{row.method} (lossy)",
            f"{row.tokens_per_second:.1f}",
            "withheld" if row.speedup is None else f"{row.speedup:.2f}x",
            f"{100 * row.spread:.0f}%",
            "-" if row.tokens_per_step is None else f"{row.tokens_per_step:.2f}",
            "-" if row.acceptance is None else f"{100 * row.acceptance:.0f}%",
            identity(row),
        )
    return result


def score_table(rows: Sequence[Row]) -> Table:
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
    """`yes`, or how many answers are the same (`78/80`), then near-ties and wrong answers."""
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
            parts.append(f"{100 * row.repeats:.0f}% in loops")
        if row.score_kept is not None:
            parts.append(f"{100 * row.score_kept:.1f}% of score")
        return "\n".join(parts)
    parts = [f"{row.identical}/{total}"]
    if row.near_ties:
        parts.append(f"{row.near_ties} near-tie" + "s" * (row.near_ties > 1))
    if row.diverged:
        parts.append(f"{row.diverged} WRONG")
    return "\n".join(parts)


NEAR_TIE = (
    "A near-tie is a place where two tokens score the same up to rounding, so that either is right."
)


def _caption(rows: Sequence[Row], against: Row | None) -> str:
    if against is None:
        return "No speedups, because this run has no correct baseline."
    lines = [f"Speedup: tokens/s compared with {against.method}, the faster baseline."]
    if any(row.spread for row in rows):
        lines.append("Spread: difference between the fastest and the slowest repeat.")
    if any(row.acceptance is not None for row in rows):
        lines.append(
            "Tokens per pass: how many one pass of the model gives. Accepted: share of the drafted "
            "tokens that the pass kept."
        )
    if any(row.near_ties for row in rows):
        lines.append(NEAR_TIE)
    wrong = [row.method for row in rows if row.diverged]
    if wrong:
        lines.append(f"No speedup for {', '.join(wrong)}: answers are missing, cut or wrong.")
    lines += [f"{row.method}: {row.note}" for row in rows if row.note is not None]
    return "\n".join(lines)


def bandwidth_line(read: float, share: float | None) -> str:
    """The machine's memory bandwidth, and how much of it plain decoding uses."""
    line = f"Memory bandwidth of this machine: {read / 1e9:.1f} GB/s"
    if share is not None:
        line += f"; {PLAIN} reads weights at {100 * share:.0f}% of it"
    return line + "."


def document(provenance: dict[str, Any], rows: Sequence[Row], **settings: Any) -> dict[str, Any]:
    """The JSON of a run: provenance and settings at the top level, then `baseline` and `rows`."""
    against = reference_row(rows)
    return {
        **provenance,
        **settings,
        "baseline": None if against is None else against.method,
        "rows": [asdict(row) for row in rows],
    }
