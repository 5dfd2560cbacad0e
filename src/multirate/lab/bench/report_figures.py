"""The figures of a bench run's page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from multirate.lab.pages.figures import INKS, Figure, bars_of, legend_below, svg
from multirate.methods.spec import PLAIN

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999999")
_GREEN, _SKY = COLOURS[2], COLOURS[5]
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Markers of rows, in turn, so that colour is not the only difference."""
JUDGED = 10
"""Minimum number of checked tokens for a point of the acceptance figure."""
ROW_HEIGHT = 0.34  # inches of a row of bars
LINE = 0.23  # inches of a line of a legend
Content = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]


def plain_step(content: Content) -> float | None:
    """Seconds per plain decoding step in this run, without prefill."""
    for row in content["rows"]:
        if row["method"] == PLAIN and row.get("decode_tokens_per_second"):
            return 1 / float(row["decode_tokens_per_second"])
    return None


def step_cost(content: Content, row: Mapping[str, Any]) -> float | None:
    """Time per step of this row, in plain decoding steps."""
    plain, rate = plain_step(content), row.get("decode_tokens_per_second")
    if plain is None or not rate or not row["tokens_per_step"]:
        return None
    return float(row["tokens_per_step"]) / float(rate) / plain


def fastest(content: Content) -> Mapping[str, Any] | None:
    rows = [row for row in content["rows"] if row["lossless"] and row["speedup"] is not None]
    return max(rows, key=lambda row: float(row["speedup"]), default=None)


def figures(content: Content) -> list[Figure]:
    rows = [row for row in content["rows"] if row["speedup"] is not None]
    made = [_speedups(content, rows)] if rows else []
    costed = [row for row in rows if step_cost(content, row) is not None]
    if len(costed) > 1:
        made.append(_steps(content, costed))
    drafting = [row for row in rows if row.get("tried_at")]
    if drafting:
        made.append(_acceptance(drafting))
    timed = [row for row in rows if row.get("prefill_seconds") is not None]
    if timed and plain_step(content) is not None:
        made.append(_time(content, timed))
    return made


def _names(row: Mapping[str, Any]) -> str:
    """A row's name, in at most two lines."""
    name, _, settings = str(row["method"]).partition(":")
    if len(settings) > 22:
        settings = settings[:21] + "…"
    return f"{name}\n{settings}" if settings else name


def _height(rows: Rows) -> float:
    return max(2.2, 0.9 + ROW_HEIGHT * sum(1 + 0.45 * _names(r).count("\n") for r in rows))


def _speedups(content: Content, rows: Rows) -> Figure:
    against, best = content["baseline"], fastest(content)

    def draw(axes: Any) -> None:
        bars = axes.barh(
            bars_of(axes, [_names(row) for row in rows]),
            [row["speedup"] for row in rows],
            height=0.7,
            color=[
                (INKS["fast" if row is best else "slow"], 1.0 if row["lossless"] else 0.55)
                for row in rows
            ],
            xerr=[row["speedup"] * row["spread"] / 2 or math.nan for row in rows],
            error_kw={"ecolor": INKS["ink"], "elinewidth": 1.2, "capsize": 3},
        )
        axes.bar_label(
            bars,
            [f"{row['speedup']:.2f}x" for row in rows],
            padding=6,
            bbox={"facecolor": INKS["page"], "edgecolor": "none", "pad": 1.5},
        )
        axes.axvline(1.0, color=INKS["ink"], linewidth=1)
        axes.set_xlim(0, 1.2 * max(row["speedup"] * (1 + row["spread"] / 2) for row in rows))
        axes.set_xlabel(f"speedup over {against}")

    return Figure(
        "Speedup",
        svg(draw, "Speedup by method", height=_height(rows)),
        "Tokens per second, prefill included. Orange: the fastest lossless method. Pale: lossy "
        "methods. Whiskers: the spread between repeats.",
        f"Compared with {against}, the faster of plain decoding and transformers' generate in this "
        "run. All methods answer one prompt before the next prompt starts.",
        ["method", "speedup", "spread"],
        [[r["method"], f"{r['speedup']:.3f}", f"{r['spread']:.1%}"] for r in rows],
    )


def _steps(content: Content, rows: Rows) -> Figure:
    costs = [step_cost(content, row) or 1.0 for row in rows]
    tokens = [float(row["tokens_per_step"]) for row in rows]

    def draw(axes: Any) -> None:
        # logarithmic axes show short steps beside much longer ones, and make lines of
        # equal speed parallel
        least, most = 0.8 * min(*costs, 1.0), 1.12 * max(*costs, 1.1)
        low, high = 0.8 * min(*tokens, 1.0), 1.1 * max(*tokens, 1.1)
        axes.loglog(base=2)
        for speed in (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0):
            line = [least, most], [speed * least, speed * most]
            axes.plot(*line, color=INKS["rule"], linewidth=1.2, zorder=1)
            at = min(most, high / speed)
            if at <= least or speed * at <= low:
                continue
            axes.annotate(
                f"{speed:g}x",
                (at, speed * at),
                ha="right",
                va="top",
                color=INKS["muted"],
                fontsize=9,
                xytext=(-2, -1),
                textcoords="offset points",
            )
        for number, (cost, many) in enumerate(zip(costs, tokens, strict=True)):
            axes.plot(
                [cost],
                [many],
                linestyle="none",
                markersize=8,
                zorder=3,
                label=_label(rows[number]),
                **_style(number),
            )
        axes.set_xlim(least, most)
        axes.set_ylim(low, high)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.set_xlabel("cost of a step, in plain steps")
        axes.set_ylabel("tokens per pass")
        legend_below(axes)

    return Figure(
        "Tokens per pass and cost of a step",
        svg(draw, "Tokens per pass and cost of a step", height=_with_legend(rows)),
        "Higher is better: more tokens accepted. Further left is better: cheaper steps. Points on "
        "the same line decode at the same speed.",
        "A step is one pass of the model and the drafting before it. Tokens per "
        "pass = 1 + accepted tokens / steps. Cost of a step = decoding time / steps, without "
        "prefill.",
        ["method", "tokens per pass", "cost of a step"],
        [
            [r["method"], f"{many:.3f}", f"{cost:.3f}"]
            for r, many, cost in zip(rows, tokens, costs, strict=True)
        ],
    )


def _acceptance(rows: Rows) -> Figure:
    shares = [
        [
            hits / tries
            for hits, tries in zip(r["accepted_at"], r["tried_at"], strict=True)
            if tries >= JUDGED
        ]
        for r in rows
    ]

    def draw(axes: Any) -> None:
        for number, share in enumerate(shares):
            places, values = range(1, len(share) + 1), [100 * value for value in share]
            axes.plot(places, values, markersize=5, label=_label(rows[number]), **_style(number))
        longest = max((len(share) for share in shares), default=0)
        axes.set_xticks(range(1, longest + 1, max(1, longest // 8)))
        axes.set_ylim(0, 103)
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("accepted (%)")
        legend_below(axes)

    return Figure(
        "Acceptance by position in the draft",
        svg(draw, "Acceptance by position in the draft", height=_with_legend(rows)),
        "How often a drafted token is accepted after all tokens before it were. Long drafts are "
        "rare, because methods only draft far ahead when they are confident.",
        "Accepted tokens / checked tokens at each position, over all repeats. Positions with fewer "
        f"than {JUDGED} checked tokens are not drawn.",
        ["method", "position", "checked", "accepted"],
        [
            [r["method"], str(place + 1), str(tried), f"{r['accepted_at'][place] / tried:.1%}"]
            for r in rows
            for place, tried in enumerate(r["tried_at"])
            if tried
        ],
    )


def _time(content: Content, rows: Rows) -> Figure:
    known = [row for row in rows if row.get("split")]
    if len(known) > 1:  # the others do not report the parts of their time
        rows = known
        return _stacked(
            rows,
            (
                ("prefill", INKS["muted"]),
                ("layers", INKS["slow"]),
                ("LM head", _SKY),
                ("drafting", INKS["fast"]),
                ("other", INKS["rule"]),
            ),
            [_timed_parts(row) for row in rows],
            "Blue: the model's layers, decoding or verifying. Orange: making drafts.",
            "The engine measures prefill. The kernel measures the other parts, and the engine "
            "measures drafts made outside the kernel. Other: choosing drafts, streaming, Python.",
        )
    step = plain_step(content) or 0.0
    parts = []
    for row in rows:
        prefill = row["prefill_seconds"]
        passes = min(row["steps"] * step, row["seconds"] - prefill)
        parts.append((prefill, passes, row["seconds"] - prefill - passes))
    return _stacked(
        rows,
        (
            ("prefill", INKS["muted"]),
            ("plain decoding steps", INKS["slow"]),
            ("drafting, verifying and other", INKS["fast"]),
        ),
        parts,
        "Blue: the time of the same number of plain steps. Orange: the time that drafting and "
        "verifying add.",
        "Prefill time, number of steps times the time of a plain step in this run, and the "
        "remaining time, each divided by the number of tokens.",
    )


def _timed_parts(row: Mapping[str, Any]) -> tuple[float, ...]:
    split, prefill = row["split"], row["prefill_seconds"]
    known = split["own"], split["head"], split["draft"]
    return prefill, *known, max(row["seconds"] - prefill - sum(known), 0.0)


def _stacked(
    rows: Rows,
    kinds: Sequence[tuple[str, str]],
    parts: Sequence[Sequence[float]],
    reading: str,
    definition: str,
) -> Figure:
    """Stacked bars of milliseconds per token. kinds: names and colours of the parts. parts: seconds
    of each part, by row.
    """
    names = [name for name, _ in kinds]
    shares = [
        [1e3 * seconds / row["tokens"] for seconds in part]
        for row, part in zip(rows, parts, strict=True)
    ]

    def draw(axes: Any) -> None:
        places = bars_of(axes, [_names(row) for row in rows])
        begin = [0.0] * len(rows)
        for kind, (name, ink) in enumerate(kinds):
            values = [part[kind] for part in shares]
            axes.barh(places, values, left=begin, height=0.7, color=ink, label=name)
            begin = [a + b for a, b in zip(begin, values, strict=True)]
        axes.set_xlabel("milliseconds per token")
        legend_below(axes)

    return Figure(
        "Where a token's time goes",
        svg(draw, "Where a token's time goes", height=_height(rows) + LINE * len(kinds)),
        reading,
        definition,
        ["method", *names],
        [
            [row["method"], *(f"{value:.2f} ms" for value in part)]
            for row, part in zip(rows, shares, strict=True)
        ],
    )


def _label(row: Mapping[str, Any]) -> str:
    name = str(row["method"])
    return name if len(name) <= 34 else name[:33] + "…"


def _style(number: int) -> dict[str, str]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[(number // len(COLOURS) + number) % len(MARKERS)],
        "markeredgecolor": INKS["ink"],
    }


def _with_legend(rows: Rows) -> float:
    return 3.6 + LINE * len(rows)
