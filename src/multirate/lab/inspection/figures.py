"""The page's figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from multirate.lab.inspection.colourings import FEW, Category, Colouring
from multirate.lab.inspection.inspect import Inspection
from multirate.lab.inspection.residuals import Quartiles
from multirate.lab.inspection.text_pass import TextValues
from multirate.lab.pages.figures import INKS, Figure, legend_above, svg

DASHED = (0, (4, 1.5))
COPIED = "#cc79a7"
"""Colour of tokens that needed no layer. The others use viridis by depth; early ones are bright."""


def colour(category: Category) -> str:
    """Of a category's tokens and bar, as CSS: the full model's is neutral."""
    if category.depth == 1:
        return "var(--muted)"
    return COPIED if category.depth is None else _viridis(category.depth)


def _viridis(depth: float) -> str:
    """Without its darkest and brightest colours, which one of the two pages would hide."""
    import matplotlib

    red, green, blue, _ = matplotlib.colormaps["viridis"](0.97 - 0.72 * depth)
    return "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))


def layer_figures(inspection: Inspection) -> list[Figure]:
    values = inspection.values
    tokens = f"over the {inspection.tokens} tokens of the answer"
    if len(inspection.texts) > 1:
        tokens = f"over the {inspection.tokens} tokens of {len(inspection.texts)} answers"
    return [
        _by_layer(
            "Residual velocity",
            values.velocity,
            1,
            "relative change ‖Δh‖ / ‖h‖",
            "How far each layer moves the residual, relative to the residual's length.",
            f"‖h(i) − h(i−1)‖ / ‖h(i−1)‖ at layer i. h(0) is the embedding. Median and quartiles "
            f"{tokens}, on a logarithmic scale.",
            logarithmic=True,
        ),
        _by_layer(
            "Direction of the residual",
            values.residual_direction,
            1,
            "cosine of h before and after",
            "How much each layer turns the residual. 1 means not at all.",
            f"cos(h(i−1), h(i)) at layer i. Median and quartiles {tokens}.",
        ),
        _by_layer(
            "Direction of the change",
            values.change_direction,
            2,
            "cosine of consecutive changes",
            "Whether consecutive layers push in the same direction (1), at a right angle (0) or in "
            "opposite directions (−1).",
            f"cos(h(i−1) − h(i−2), h(i) − h(i−1)) at layer i. Median and quartiles {tokens}.",
        ),
        _alignment(inspection, values, tokens),
        _agreement(inspection, values, tokens),
    ]


def histogram(inspection: Inspection, colouring: Colouring) -> Figure:
    counts, total = colouring.counts(), inspection.tokens

    def draw(axes: Any) -> None:
        places = np.arange(len(counts))
        bars = axes.bar(
            places,
            counts,
            width=0.8,
            color=[_drawn(colour(one)) for one in colouring.categories],
            edgecolor=INKS["ink"],
            linewidth=0.6,
        )
        if len(counts) <= FEW:
            labels = [f"{count} ({count / total:.0%})" for count in counts]
            axes.bar_label(bars, labels, padding=2)
            axes.set_xticks(places, [one.tick for one in colouring.categories])
            axes.set_xlim(-0.6, max(len(counts), 2) - 0.4)
        else:
            step = max(1, len(counts) // FEW)
            shown = list(range(step - 1, len(counts), step))
            axes.set_xticks(shown, [colouring.categories[i].tick for i in shown])
        axes.margins(y=0.14)
        axes.set_xlabel(
            colouring.axis if len(counts) <= FEW else f"{colouring.axis} (number of layers run)"
        )
        axes.set_ylabel("tokens")

    return Figure(
        colouring.title,
        svg(draw, f"Histogram: {colouring.title.lower()}"),
        colouring.meaning,
        f"{total} tokens. Each bar has the colour of its tokens in the text.",
        [colouring.axis, "tokens", "share"],
        [
            [one.label, str(count), f"{count / total:.1%}"]
            for one, count in zip(colouring.categories, counts, strict=True)
        ],
    )


def _by_layer(
    title: str,
    values: np.ndarray,
    first: int,
    label: str,
    caption: str,
    method: str,
    logarithmic: bool = False,
) -> Figure:
    """values [layers from `first` on, n]."""
    layers = range(first, first + len(values))
    spread = Quartiles.of(values) if len(values) else Quartiles([], [], [])

    def draw(axes: Any) -> None:
        _band(axes, layers, spread, "slow")
        if logarithmic and len(values):
            axes.set_yscale("log")
            _plain_ticks(axes)
        _layer_axis(axes, layers)
        axes.set_ylabel(label)

    return Figure(
        title,
        svg(draw, f"{title} by layer"),
        caption,
        method,
        ["layer", "lower quartile", "median", "upper quartile"],
        _quartile_rows(layers, spread),
    )


def _alignment(inspection: Inspection, values: TextValues, tokens: str) -> Figure:
    layers = range(len(values.alignment))
    plain = Quartiles.of(values.alignment)
    passed = [Quartiles.of(one.alignment) for one in values.intervals]
    read = [Quartiles.of(one.read_alignment[None]) for one in values.intervals]
    rows = [["plain", *row] for row in _quartile_rows(layers, plain)]
    for one, states, here in zip(values.intervals, passed, read, strict=True):
        on_the_way = _quartile_rows(range(one.start, one.gate + 1), states)
        rows += [["accelerated", *row] for row in on_the_way]
        rows += [["read at the gate", *row] for row in _quartile_rows([one.gate], here)]

    def draw(axes: Any) -> None:
        _streams(axes, layers, plain, values, passed, [here.median[0] for here in read])
        axes.set_ylabel("cosine with the final residual")
        if values.intervals:
            legend_above(axes)

    fast = (
        " Orange: the accelerated residual, which starts again at every gate. Diamonds: what the "
        "LM head reads there, after the accelerator's fusion and block if it has them."
        if values.intervals
        else ""
    )
    return Figure(
        "Alignment with the final residual",
        svg(draw, "Alignment with the final residual by layer"),
        f"How close the residual is to the final residual.{fast}",
        f"cos(h(i), h({inspection.layers})) after layer i. h(0) is the embedding. Median and "
        f"quartiles {tokens}.",
        ["residual", "after layer", "lower quartile", "median", "upper quartile"],
        rows,
    )


def _agreement(inspection: Inspection, values: TextValues, tokens: str) -> Figure:
    layers = range(1, len(values.agrees) + 1)

    def shares(agrees: np.ndarray) -> Quartiles:
        percent = (100 * agrees.mean(axis=-1)).tolist()
        return Quartiles(percent, percent, percent)

    plain = shares(values.agrees)
    passed = [shares(one.agrees) for one in values.intervals]
    read = [100 * float(one.read_agrees.mean()) for one in values.intervals]
    rows = [["plain", str(i), f"{one:.1f}%"] for i, one in zip(layers, plain.median, strict=True)]
    for one, states, here in zip(values.intervals, passed, read, strict=True):
        for layer, share in enumerate(states.median, start=one.start):
            rows.append(["accelerated", str(layer), f"{share:.1f}%"])
        rows.append(["read at the gate", str(one.gate), f"{here:.1f}%"])

    def draw(axes: Any) -> None:
        _streams(axes, layers, plain, values, passed, read)
        axes.set_ylim(-3, 103)
        axes.set_ylabel("tokens that agree (%)")
        legend_above(axes)

    return Figure(
        "Agreement of the early exit",
        svg(draw, "Top-1 agreement of the early exit by layer"),
        "How often the LM head, applied after this layer, gives the full model's token.",
        f"argmax of head(norm(h(i))) compared with argmax of "
        f"head(norm(h({inspection.layers}))): share {tokens}.",
        ["residual", "after layer", "tokens that agree"],
        rows,
    )


def _quartile_rows(layers: Sequence[int], spread: Quartiles) -> list[list[str]]:
    return [
        [str(layer), *(f"{value:.3f}" for value in values)]
        for layer, *values in zip(layers, spread.lower, spread.median, spread.upper, strict=True)
    ]


# -- drawing ---------------------------------------------------------------------------------------


def _drawn(css: str) -> str:
    return INKS["muted"] if css == "var(--muted)" else css


def _band(
    axes: Any, layers: Sequence[int], spread: Quartiles, ink: str, label: str | None = None
) -> None:
    """Median and quartiles. The accelerated residual's line is dashed: colour is not all that tells
    it.
    """
    drawn: Any = {"color": INKS[ink], "linestyle": "-" if ink == "slow" else DASHED}
    if len(layers) <= 8:
        drawn |= {"marker": "o", "markersize": 4}
    axes.fill_between(layers, spread.lower, spread.upper, color=INKS[ink], alpha=0.22, linewidth=0)
    axes.plot(layers, spread.median, label=label, **drawn)


def _streams(
    axes: Any,
    layers: range,
    plain: Quartiles,
    values: TextValues,
    passed: Sequence[Quartiles],
    read: Sequence[float],
) -> None:
    """The plain residual's values, and of each interval the accelerated one's and what the head
    reads at its gate.
    """
    _band(axes, layers, plain, "slow", "plain residual")
    labels = ["accelerated residual", "read at a gate"]
    for one, states, here in zip(values.intervals, passed, read, strict=True):
        _band(axes, range(one.start, one.gate + 1), states, "fast", labels[0] or None)
        _gate(axes, one.gate, [states.median[-1], here], labels[1] or None)
        labels = ["", ""]  # one entry of the legend for all intervals
    _layer_axis(axes, range(layers[-1] + 1) if values.intervals else layers)


def _gate(axes: Any, gate: int, values: Sequence[float], label: str | None) -> None:
    """values: of the stream after the gate's last layer, and of what the head reads there."""
    axes.plot([gate, gate], values, color=INKS["fast"], linewidth=1.2, linestyle=":")
    axes.plot(
        [gate],
        values[-1:],
        linestyle="none",
        marker="D",
        markersize=7,
        color=INKS["fast"],
        markeredgecolor=INKS["ink"],
        markeredgewidth=0.8,
        label=label,
    )


def _layer_axis(axes: Any, layers: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    if len(layers):
        axes.set_xlim(layers[0] - 0.3, layers[-1] + 0.3)
    axes.set_xlabel("layer (number of layers run)")


def _plain_ticks(axes: Any) -> None:
    """0.1, 1, 10 instead of powers, also between where the range is small."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_ylim()
    wide = high / low > 30
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
