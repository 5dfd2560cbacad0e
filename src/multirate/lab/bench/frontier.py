"""Quality against speed: the best speedup of every method at a share of the full model's quality.

A run measures a dynamic mode at several settings (`settings_of`), with the lossless method for
comparison. Quality is what the run measured (`Row.quality`), not the calibrated target. Settings
whose answers repeat in loops do not count: the full model would continue a loop as well, so they
look better than they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from rich.table import Table

from multirate.engine import Engine
from multirate.errors import UserError
from multirate.lab.bench.rows import Row
from multirate.lab.calibration.repetition import MOST_LOOPING
from multirate.methods import spec
from multirate.methods.spec import PLAIN, DynamicMode

QUALITIES = (0.99, 0.95, 0.9)
POINTS = 6
"""Default number of thresholds measured per method, spread evenly."""


@dataclass(frozen=True)
class Best:
    """The fastest setting of a method whose kept quality is at least `quality`.

    method: without settings. setting: the row's whole name. kept: Row.quality. speedup, lossless:
    as the row's.
    """

    method: str
    quality: float
    setting: str
    kept: float
    speedup: float
    lossless: bool


def settings_of(engine: Engine, points: int = POINTS) -> list[str]:
    """The rows of a dynamic comparison: plain decoding, for each of the engine's accelerators that
    has a dynamic mode the method with its own settings and `points` thresholds of its path, and the
    latter of each method that needs no training. Raises UserError where accelerators are given and
    none of them has such a mode.
    """
    names = [PLAIN]
    for name, accelerator in engine.accelerators.items():
        mode = spec.find(accelerator.method).dynamic
        if mode is not None:
            names += [name, *_along(name, mode, accelerator.module, points)]
    if len(names) == 1 and engine.accelerators:
        raise UserError(
            f"--methods dynamic needs an accelerator with a dynamic mode, one of "
            f"{', '.join(spec.dynamic_methods(trained=True))}; given: "
            f"{', '.join(engine.accelerators)}"
        )
    for name in spec.dynamic_methods(trained=False):
        mode = spec.find(name).dynamic
        assert mode is not None
        names += _along(name, mode, None, points)
    return list(dict.fromkeys(names))


def _along(name: str, mode: DynamicMode, module: Any, points: int) -> list[str]:
    """Thresholds of a method's dials, as its name with settings."""
    names = []
    for dial in mode.dials:
        for threshold in dial.along(points):
            settings = dial.settings(module, round(threshold, 4))
            names.append(spec.write_variant(name, settings))
    return names


def frontier(rows: Sequence[Row], qualities: Sequence[float] = QUALITIES) -> list[Best]:
    """For each method, in the rows' order, its best at each quality that it reaches. Rows without a
    speedup (wrong answers) and lossy ones whose quality was not measured do not count, nor do those
    whose answers loop (`MOST_LOOPING`), unless their quality is a task's score, which sees it.
    """
    most = MOST_LOOPING + next((row.repeats for row in rows if row.method == PLAIN), 0.0)
    found: dict[tuple[str, float], Best] = {}
    for row, quality in product(rows, qualities):
        method, kept = row.method.partition(":")[0], row.quality
        loops = not row.lossless and row.score_kept is None and row.repeats > most
        if kept is None or kept < quality or row.speedup is None or loops:
            continue
        best = found.get((method, quality))
        if best is None or row.speedup > best.speedup:
            one = Best(method, quality, row.method, kept, row.speedup, row.lossless)
            found[method, quality] = one
    methods = list(dict.fromkeys(row.method.partition(":")[0] for row in rows))
    return sorted(found.values(), key=lambda b: (methods.index(b.method), -b.quality))


def table(bests: Sequence[Best], measure: str = "tokens that match the full model's") -> Table:
    """A row per method, a column per quality. measure: what quality is a share of."""
    qualities = sorted({best.quality for best in bests}, reverse=True)
    result = Table(
        title=f"Best speedup at each quality ({measure})",
        title_justify="left",
        caption="Settings do not count if their answers repeat in loops: over "
        f"{MOST_LOOPING:.0%} more repeated tokens than plain decoding, and no task score.",
        caption_justify="left",
        pad_edge=False,
    )
    result.add_column("method", overflow="fold", max_width=14)
    for quality in qualities:
        result.add_column(f"{100 * quality:.0f}%", justify="right", overflow="fold")
    for method in dict.fromkeys(best.method for best in bests):
        cells = []
        for quality in qualities:
            best = next((b for b in bests if (b.method, b.quality) == (method, quality)), None)
            cells.append("-" if best is None else _cell(best))
        result.add_row(method, *cells)
    return result


def _cell(best: Best) -> str:
    setting = best.setting.partition(":")[2] or ("lossless" if best.lossless else "defaults")
    return f"{best.speedup:.2f}x\n{100 * best.kept:.1f}% kept\n{setting}"
