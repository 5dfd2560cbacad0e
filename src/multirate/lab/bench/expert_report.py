"""Expert policies as a table of 80 columns, as JSON, and as a page with a token's timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from multirate.experts.stats import Event
from multirate.lab.bench.expert_policies import RESIDENT, ExpertRow, ExpertRun
from multirate.lab.pages import page as pages

_FACTS = ("model", "suite", "prompts", "max_new_tokens", "reads")
_HEADS = (
    "method",
    "tokens/s",
    "speedup",
    "upper bound",
    "with prompts",
    "hit rate",
    "prefetched",
    "used",
    "layers ahead",
    "late",
    "unused",
    "MB/token",
    "waiting ms",
    "predictor ms",
    "first token ms",
    "same text",
)


@dataclass(frozen=True)
class Kind:
    """How the timeline shows a kind of event: lanes are of computing, of the reads that it waits
    for, and of prefetches.
    """

    words: str
    lane: int
    colour: str


_KINDS = {
    "compute": Kind("computing", 0, "#2f6f4f"),
    "predict": Kind("predicting", 0, "#8a6d1d"),
    "stall": Kind("waiting for a read", 0, "#c9cdd2"),
    "demand": Kind("reading on demand", 1, "#b3392f"),
    "speculative": Kind("prefetching", 2, "#2b5c9e"),
}


@dataclass(frozen=True)
class Arithmetic:
    """docs/experts.md: x = T_io / T_c (reading a token's experts against computing it), h, r and p
    of a policy, and the greatest speedup over on-demand that these allow: (1 + x) / max(1 + a(1 −
    r)x, a(1 − r + r/p)x), a = 1 − h.
    """

    x: float
    h: float
    r: float
    p: float

    @property
    def bound(self) -> float:
        """The greatest speedup over on-demand."""
        a, p = 1 - self.h, max(self.p, 1e-9)
        ahead = self.r / p if self.r else 0.0
        return (1 + self.x) / max(
            1 + a * (1 - self.r) * self.x, a * (1 - self.r + ahead) * self.x, 1e-9
        )


def arithmetic(rows: Sequence[ExpertRow], row: ExpertRow) -> Arithmetic | None:
    """From the resident and on-demand rows of the same budget; None without them."""
    resident = next((r for r in rows if r.method == RESIDENT), None)
    on_demand = next((r for r in rows if r.method == "on_demand"), None)
    if resident is None or on_demand is None:
        return None
    x = resident.tokens_per_second / on_demand.tokens_per_second - 1
    return Arithmetic(max(x, 0.0), row.hit_rate, row.prefetch_recall, row.prefetch_precision)


def table(rows: Sequence[ExpertRow], title: str) -> Table:
    made = Table(
        title=title, box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, title_justify="left"
    )
    made.caption_justify, made.caption = (
        "left",
        (
            "All columns except `first` leave out the first token. Speedup: compared with\n"
            "on_demand. hit: experts found in memory. ahead: share of the others that\n"
            "were prefetched. used: share of the prefetched experts that were needed.\n"
            "MB, ms: data read and time spent waiting, per token. first: ms to the first token."
        ),
    )
    made.add_column("method", min_width=15, no_wrap=True)
    for heading in ("tok/s", "speedup", "hit", "ahead", "used", "MB", "ms", "first", "same"):
        made.add_column(heading, justify="right")
    for row in rows:
        read_ahead = row.prefetch_recall > 0 or row.wasted > 0
        made.add_row(
            row.method,
            f"{row.tokens_per_second:.1f}",
            "-" if row.speedup is None else f"{row.speedup:.2f}x",
            f"{100 * row.hit_rate:.0f}%",
            f"{100 * row.prefetch_recall:.0f}%" if read_ahead else "-",
            f"{100 * row.prefetch_precision:.0f}%" if read_ahead else "-",
            f"{row.bytes_per_token / 1e6:.2f}",
            f"{row.stall_ms:.2f}",
            f"{row.first_token_ms:.0f}",
            "yes" if row.identical else "WRONG",
        )
    return made


def page(run: ExpertRun, content: Mapping[str, Any]) -> str:
    """A self-contained HTML page: a table per budget, measured speedup beside the bound, a token's
    timeline per policy.
    """
    longest = max((e.end for events in run.timelines.values() for e in events), default=0.0)
    return pages.render(
        "multirate.lab.bench",
        "experts.html.jinja",
        "report.css",
        title="Experts loaded from disk",
        lead=[],
        heads=_HEADS,
        tables=[(size(budget), [_cells(rows, r) for r in rows]) for budget, rows in run.budgets],
        kinds=_KINDS,
        timelines={name: _bars(events, longest) for name, events in run.timelines.items()},
        scale=f"{1e3 * longest:.2f}",
        facts={**{key: content[key] for key in _FACTS}, **pages.facts(content)},
    )


def size(count: int) -> str:
    if count < 10**6:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e6:.1f} MB" if count < 10**9 else f"{count / 1e9:.2f} GB"


def _cells(rows: Sequence[ExpertRow], row: ExpertRow) -> tuple[str, ...]:
    at_most = arithmetic(rows, row)
    return (
        row.method,
        f"{row.tokens_per_second:.1f}",
        "–" if row.speedup is None else f"{row.speedup:.2f}×",
        "–" if at_most is None or row.method == RESIDENT else f"{at_most.bound:.2f}×",
        "–" if row.total_speedup is None else f"{row.total_speedup:.2f}×",
        f"{100 * row.hit_rate:.0f}%",
        f"{100 * row.prefetch_recall:.0f}%",
        f"{100 * row.prefetch_precision:.0f}%",
        "–" if row.depth is None else str(row.depth),
        str(row.late),
        str(row.wasted),
        f"{row.bytes_per_token / 1e6:.2f}",
        f"{row.stall_ms:.2f}",
        f"{row.predictor_ms:.2f}",
        f"{row.first_token_ms:.0f}",
        "yes" if row.identical else "WRONG",
    )


def _bars(events: Sequence[Event], longest: float) -> list[dict[str, Any]]:
    """What the timeline draws, 1000 wide. Waiting comes first, below what happens in it."""
    scale = 1000 / longest if longest else 0.0
    bars = []
    for event in sorted(events, key=lambda e: e.kind != "stall"):
        kind, seconds = _KINDS[event.kind], event.end - event.begin
        which = f", expert {event.expert}" if event.expert >= 0 else ""
        label = f"{kind.words}, layer {event.row}{which}: {1e3 * seconds:.3f} ms"
        width = max(seconds * scale, 0.8)
        bars.append({"kind": kind, "x": event.begin * scale, "width": width, "label": label})
    return bars
