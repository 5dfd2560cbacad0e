"""Figures for a page: SVG drawn by matplotlib, with colours from the page's CSS.

Matplotlib writes the colours of INKS, which become CSS variables, so that one drawing serves the
light and the dark page. Text stays text, in the page's font.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

INKS = {
    "ink": "#010101",
    "muted": "#020202",
    "rule": "#030303",
    "slow": "#040404",
    "fast": "#050505",
    "page": "#060606",
}
"""CSS variable → the colour that matplotlib writes in its place."""
WIDTH, HEIGHT = 5.2, 3.5  # inches of 72 units: on a phone a unit is then about a CSS pixel


@dataclass
class Figure:
    """svg: the drawing. caption: what it shows. method: how it was computed. columns, rows: its
    values as a table.
    """

    title: str
    svg: str
    caption: str
    method: str
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)


def legend_above(axes: Any) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def legend_below(axes: Any) -> None:
    """A legend with a line for each row, below the axis label, for which the layout makes room."""
    axes.figure.legend(loc="outside lower left", ncols=1)


def bars_of(axes: Any, names: Sequence[str]) -> list[int]:
    """Prepares horizontal bars, the first on top → their positions."""
    places = list(range(len(names)))
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    return places


def svg(draw: Callable[[Any], None], name: str, height: float = HEIGHT) -> str:
    """draw(axes) on new axes → an <svg> element. name: its label for screen readers."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Drawing

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.size": 11,
        "axes.edgecolor": INKS["muted"],
        "axes.labelcolor": INKS["ink"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": INKS["rule"],
        "grid.linewidth": 0.7,
        "xtick.color": INKS["muted"],
        "ytick.color": INKS["muted"],
        "xtick.labelcolor": INKS["ink"],
        "ytick.labelcolor": INKS["ink"],
        "text.color": INKS["ink"],
        "lines.linewidth": 2,
        "legend.frameon": False,
        "legend.labelcolor": INKS["ink"],
        "legend.fontsize": 10,
        "legend.handlelength": 1.6,
        "legend.columnspacing": 1.0,
        "legend.borderaxespad": 0.2,
    }
    with matplotlib.rc_context(style):
        drawing = Drawing(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(drawing)
        axes = drawing.add_subplot()
        draw(axes)
        axes.grid(visible=False, axis="x")
        written = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        drawing.savefig(written, format="svg", transparent=True, metadata=nothing)
    return _for_page(written.getvalue(), name)


def _for_page(text: str, name: str) -> str:
    """Matplotlib's file as an element of an HTML page: without prologue and addresses, with unique
    ids and colours from CSS.
    """
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s(?:xmlns(?::xlink)?|version|width|height)="[^"]*"', "", text, count=5)
    key = re.sub(r"\W+", "-", name.lower())
    text = re.sub(r'\bid="', f'id="{key}-', text)
    text = re.sub(r'(?:xlink:)?href="#', f'href="#{key}-', text)
    text = text.replace("url(#", f"url(#{key}-")
    for variable, written in INKS.items():
        text = text.replace(written, f"var(--{variable})")
    label = html.escape(name, quote=True)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()
