"""Expert policies as a table of 80 columns, as JSON, and as a page with a token's timeline."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from multirate.experts.stats import Event
from multirate.lab.bench.expert_policies import RESIDENT, ExpertRow, ExpertRun
from multirate.lab.pages.page import MARK

_LANES = {"compute": 0, "predict": 0, "stall": 0, "demand": 1, "speculative": 2}
_COLOURS = {
    "compute": "#2f6f4f",
    "predict": "#8a6d1d",
    "stall": "#c9cdd2",
    "demand": "#b3392f",
    "speculative": "#2b5c9e",
}
_WORDS = {
    "compute": "computing",
    "predict": "predicting",
    "stall": "waiting for a read",
    "demand": "reading on demand",
    "speculative": "prefetching",
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
    """The rows of one budget for a terminal."""
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
    tables = "".join(
        f"<h2>{size(budget)} for experts</h2>{_table(rows)}" for budget, rows in run.budgets
    )
    longest = max((e.end for events in run.timelines.values() for e in events), default=0.0)
    pictures = "".join(
        f"<figure><figcaption>{html.escape(name)}</figcaption>{_picture(events, longest)}</figure>"
        for name, events in run.timelines.items()
    )
    legend = "".join(
        f'<span><i style="background:{_COLOURS[kind]}"></i>{word}</span>'
        for kind, word in _WORDS.items()
    )
    facts = ", ".join(
        f"{key}: {html.escape(str(content[key]))}"
        for key in (
            "model",
            "suite",
            "prompts",
            "max_new_tokens",
            "cpu",
            "threads",
            "date",
            "version",
            "commit",
            "reads",
        )
        if content.get(key) is not None
    )
    return _PAGE.format(
        mark=MARK,
        tables=tables,
        pictures=pictures,
        legend=legend,
        facts=facts,
        scale=f"{1e3 * longest:.2f}" if longest else "0",
    )


def size(count: int) -> str:
    """A readable number of bytes."""
    if count < 10**6:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e6:.1f} MB" if count < 10**9 else f"{count / 1e9:.2f} GB"


def _table(rows: Sequence[ExpertRow]) -> str:
    heads = (
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
    lines = []
    for row in rows:
        at_most = arithmetic(rows, row)
        values = (
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
        lines.append(
            "<tr>" + "".join(f"<td>{html.escape(value)}</td>" for value in values) + "</tr>"
        )
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        "<div "
        f'class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def _picture(events: Sequence[Event], longest: float) -> str:
    """Three lanes of bars (compute, demand reads, reads ahead) over one token, an SVG that scales
    with the page.
    """
    width, lane = 1000, 26
    scale = width / longest if longest else 0.0
    bars = []
    for event in sorted(
        events, key=lambda e: e.kind != "stall"
    ):  # waiting is drawn below what happens in it
        x, w = event.begin * scale, max((event.end - event.begin) * scale, 0.8)
        what = f"{_WORDS[event.kind]}, layer {event.row}" + (
            f", expert {event.expert}" if event.expert >= 0 else ""
        )
        bars.append(
            f'<rect x="{x:.1f}" y="{_LANES[event.kind] * lane + 3}" width="{w:.1f}" '
            f'height="{lane - 6}" '
            f'fill="{_COLOURS[event.kind]}"><title>{what}: {1e3 * (event.end - event.begin):.3f} '
            "ms</title></rect>"
        )
    lines = "".join(
        f'<line x1="0" x2="{width}" y1="{y}" y2="{y}" stroke="#e3e5e8"/>' for y in (lane, 2 * lane)
    )
    return (
        f'<svg viewBox="0 0 {width} {3 * lane}" preserveAspectRatio="none" '
        f'role="img">{lines}{"".join(bars)}</svg>'
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">{mark}<meta name="viewport" content="width=device-width,
initial-scale=1">
<title>Expert loading</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1d2126; background: #fff; margin: 0 auto;
max-width: 84rem;
padding: 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; white-space: nowrap; font-size:
0.78rem; }}
th, td {{ text-align: right; padding: 0.3rem 0.4rem; border-bottom: 1px solid #e3e5e8; }}
th:first-child, td:first-child {{ text-align: left; }}
figure {{ margin: 1rem 0; }} figcaption {{ font-weight: 600; font-size: 0.9rem; }}
svg {{ width: 100%; height: 5.2rem; border: 1px solid #e3e5e8; display: block; }}
.legend span {{ display: inline-block; margin-right: 1rem; }}
.legend i {{ display: inline-block; width: 0.8rem; height: 0.8rem; margin-right: 0.35rem;
vertical-align: -0.1rem; }}
.facts {{ color: #5a626b; font-size: 0.85rem; overflow-wrap: anywhere; }}
</style></head><body>
<h1>Experts loaded from disk: policies compared on the same tokens</h1>
<p class="facts">{facts}</p>{tables}
<p>All columns except “with prompts” and “first token ms” leave out the first token. Speedups are
compared with on_demand. Upper bound: the largest speedup that the hit rate and the prefetches
allow, computed from the resident and on_demand rows (docs/experts.md). Layers ahead: how many
layers ahead experts were predicted at the end of the run.</p>
<h2>One token, at the first memory budget</h2>
<p>Upper lane: the compute thread (white: attention and all else). Middle lane: reads it waits for.
Lower lane: prefetches. All pictures have the same scale and are {scale} ms wide.</p><p
class="legend">{legend}</p>{pictures}
</body></html>
"""
