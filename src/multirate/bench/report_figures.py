"""The figures of a bench run's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from multirate.methods.spec import PLAIN
from multirate.pages.figures import INKS, Figure, svg

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999999")
_GREEN, _SKY = COLOURS[2], COLOURS[5]
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Of rows, in turn: colour is not all that tells them apart."""
JUDGED = 10
"""Tokens at a place of their drafts, at least, for a point of the acceptance figure."""
ROW_HEIGHT = 0.34  # inches of a row of bars
Content = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]


def plain_step(content: Content) -> float | None:
    """Seconds of a plain decoding step in this run, prefill apart."""
    for row in content["rows"]:
        if row["method"] == PLAIN and row.get("decode_tokens_per_second"):
            return 1 / float(row["decode_tokens_per_second"])
    return None


def step_cost(content: Content, row: Mapping[str, Any]) -> float | None:
    """What a step of this row took, in plain steps."""
    plain, rate = plain_step(content), row.get("decode_tokens_per_second")
    if plain is None or not rate or not row["tokens_per_step"]:
        return None
    return float(row["tokens_per_step"]) / float(rate) / plain


def fastest(content: Content) -> Mapping[str, Any] | None:
    """The lossless row with the largest speedup."""
    rows = [row for row in content["rows"] if row["lossless"] and row["speedup"] is not None]
    return max(rows, key=lambda row: float(row["speedup"]), default=None)


def figures(content: Content) -> list[Figure]:
    """Those that the run has figures for."""
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
    """A row's name in at most two lines."""
    name, _, settings = str(row["method"]).partition(":")
    if len(settings) > 22:
        settings = settings[:21] + "…"
    return f"{name}\n{settings}" if settings else name


def _bars(axes: Any, rows: Rows) -> list[int]:
    """A horizontal axis of rows, the first on top → their places."""
    places = list(range(len(rows)))
    axes.set_yticks(places, [_names(row) for row in rows])
    axes.invert_yaxis()
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    return places


def _height(rows: Rows) -> float:
    return max(2.2, 0.9 + ROW_HEIGHT * sum(1 + 0.45 * _names(r).count("\n") for r in rows))


def _speedups(content: Content, rows: Rows) -> Figure:
    against, best = content["baseline"], fastest(content)

    def draw(axes: Any) -> None:
        places = _bars(axes, rows)
        for place, row in zip(places, rows, strict=True):
            value, half = row["speedup"], row["speedup"] * row["spread"] / 2
            axes.barh(
                place,
                value,
                height=0.7,
                color=INKS["fast" if row is best else "slow"],
                alpha=1.0 if row["lossless"] else 0.55,
                xerr=half if half else None,
                error_kw={"ecolor": INKS["ink"], "elinewidth": 1.2, "capsize": 3},
            )
            axes.text(value + half, place, f" {value:.2f}x", va="center", color=INKS["ink"])
        axes.axvline(1.0, color=INKS["ink"], linewidth=1)
        axes.set_xlim(0, 1.16 * max(row["speedup"] * (1 + row["spread"] / 2) for row in rows))
        axes.set_xlabel(f"speedup over {against}")

    return Figure(
        "Speedup",
        svg(draw, "Speedup by method", height=_height(rows)),
        "Total tokens over total time, prompts included. Orange: the fastest lossless row. Pale: "
        "lossy. Whiskers: the spread of the measured passes, where there were several.",
        f"Against {against}, the faster of plain decoding and transformers' generate in this run; "
        "all methods answer a prompt before the next one comes.",
        ["method", "speedup", "spread"],
        [[r["method"], f"{r['speedup']:.3f}", f"{r['spread']:.1%}"] for r in rows],
    )


def _steps(content: Content, rows: Rows) -> Figure:
    costs = [step_cost(content, row) or 1.0 for row in rows]
    tokens = [float(row["tokens_per_step"]) for row in rows]

    def draw(axes: Any) -> None:
        # steps in stages are many times as long as others: on logarithmic axes either is told
        # apart, and lines of equal speed run side by side
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
        axes.set_xlabel("time of a step, in plain steps")
        axes.set_ylabel("tokens per step")
        _below(axes)

    return Figure(
        "Tokens per step against the cost of a step",
        svg(draw, "Tokens per step against the cost of a step", height=_with_legend(rows)),
        "A method is faster where it is further up (more tokens accepted) or further left (cheaper "
        "drafts). Lines: equal speed while decoding.",
        "tokens per step = 1 + accepted / steps; a step's time is decoding time over steps, prompt "
        "passes apart.",
        ["method", "tokens per step", "cost of a step"],
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
            places = range(1, len(share) + 1)
            axes.plot(
                places,
                [100 * value for value in share],
                linewidth=1.8,
                markersize=5,
                label=_label(rows[number]),
                **_style(number),
            )
        longest = max((len(share) for share in shares), default=0)
        axes.set_xticks(range(1, longest + 1, max(1, longest // 8)))
        axes.set_ylim(0, 103)
        axes.set_xlabel("place of the token in its draft")
        axes.set_ylabel("accepted (%)")
        _below(axes)

    return Figure(
        "Acceptance by place in the draft",
        svg(draw, "Acceptance by place in the draft", height=_with_legend(rows)),
        "How often a drafted token is accepted, once all before it were. Late places are rare: "
        "methods draft far only where they are sure.",
        "accepted / judged at each place, over all steps of all passes; drawn where at least "
        f"{JUDGED} were judged.",
        ["method", "place", "judged", "accepted"],
        [
            [r["method"], str(place + 1), str(tried), f"{r['accepted_at'][place] / tried:.1%}"]
            for r in rows
            for place, tried in enumerate(r["tried_at"])
            if tried
        ],
    )


def _time(content: Content, rows: Rows) -> Figure:
    known = [row for row in rows if row.get("split")]
    if len(known) > 1:  # others' passes are not told apart
        rows = known
        return _stacked(
            rows,
            (
                ("prompts' passes", INKS["muted"]),
                ("the model's own layers", INKS["slow"]),
                ("heads", _SKY),
                ("narrow copy's layers", _GREEN),
                ("drafts", INKS["fast"]),
                ("the rest", INKS["rule"]),
            ),
            [_timed_parts(row) for row in rows],
            "Blue: layers of the model itself, plainly or verifying. Orange: what making drafts "
            "takes.",
            "Measured: prompts' passes by the engine, the others by the kernel's own clock, drafts "
            "made outside of it by the step's. The rest: choosing drafts, streaming, Python.",
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
            ("prompts' passes", INKS["muted"]),
            ("a plain step's time", INKS["slow"]),
            ("drafts, further rows and the rest", INKS["fast"]),
        ),
        parts,
        "Blue: what as many plain steps would take. Orange: what a method adds to them for its "
        "drafts and for verifying them.",
        "Seconds of the prompts' passes, steps times this run's plain step, and what is left, over "
        "emitted tokens.",
    )


def _timed_parts(row: Mapping[str, Any]) -> tuple[float, ...]:
    split, prefill = row["split"], row["prefill_seconds"]
    known = split["own"], split["head"], split["narrow"], split["draft"]
    return prefill, *known, max(row["seconds"] - prefill - sum(known), 0.0)


def _stacked(
    rows: Rows,
    kinds: Sequence[tuple[str, str]],
    parts: Sequence[Sequence[float]],
    reading: str,
    definition: str,
) -> Figure:
    """Bars of milliseconds per token, in pieces. kinds: their names and inks; parts: of each row
    the seconds of each.
    """
    names = [name for name, _ in kinds]
    shares = [
        [1e3 * seconds / row["tokens"] for seconds in part]
        for row, part in zip(rows, parts, strict=True)
    ]

    def draw(axes: Any) -> None:
        places = _bars(axes, rows)
        begin = [0.0] * len(rows)
        for kind, (name, ink) in enumerate(kinds):
            values = [part[kind] for part in shares]
            axes.barh(places, values, left=begin, height=0.7, color=ink, label=name)
            begin = [a + b for a, b in zip(begin, values, strict=True)]
        axes.set_xlabel("milliseconds per token")
        _below(axes)

    return Figure(
        "Where a token's time goes",
        svg(draw, "Where a token's time goes", height=_height(rows) + 0.7),
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


def _below(axes: Any) -> None:
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(0, -0.17),
        ncols=1,
        frameon=False,
        labelcolor=INKS["ink"],
        fontsize=10,
        borderaxespad=0.2,
    )


def _with_legend(rows: Rows) -> float:
    return 3.6 + 0.23 * len(rows)
