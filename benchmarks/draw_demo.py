"""Record the demo's first answer, plainly and with M2R2, and draw both as one moving picture.

    python benchmarks/draw_demo.py --out docs/demo.svg

Each token of the picture appears at the time it was measured, slowed down by the factor that the
picture names. Without animation the picture shows both finished answers.
"""

from __future__ import annotations

import argparse
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from render.common import processor  # beside this file

from multirate import attach, provenance
from multirate.cli.demo import QUESTIONS, first_answer, warm_up
from multirate.cli.options import add_accelerators, load
from multirate.loading.hub import LoadedModel, reference_accelerators
from multirate.methods.spec import PLAIN, recommended

COLUMNS = 50
"""Characters of a line of an answer."""
SLOWER = 10
"""Real time is multiplied by this."""
PAUSE = 2.5
"""Seconds that the finished answers stay."""
WIDTH, LINE, LETTER, MARGIN = 820, 17, 7.2, 18
"""Pixels: of the picture, of a line's height, of a letter's width, and around a panel's text."""


@dataclass(frozen=True)
class Recording:
    """An answer: its title, its pieces of text with the seconds after which each came, its tokens
    and the seconds they took.
    """

    title: str
    pieces: list[tuple[float, str]]
    tokens: int
    seconds: float


def record(loaded: LoadedModel, method: str, title: str, max_new_tokens: int) -> Recording:
    """The first answer of a new engine, as in `multirate demo`: no earlier answer helps it."""
    engine = attach(loaded)
    if method != PLAIN:
        add_accelerators(engine, [], [method], reference_accelerators(None))
    warm_up(engine, method)
    pieces: list[tuple[float, str]] = []
    start = time.perf_counter()
    stats = first_answer(
        engine,
        method,
        max_new_tokens,
        lambda text: pieces.append((time.perf_counter() - start, text)),
    )
    return Recording(title, pieces, stats.tokens, stats.seconds)


def placed(run: Recording) -> list[tuple[float, int, int, str]]:
    """(seconds, line, column, text) of each piece of the answer, its words wrapped."""
    text = "".join(piece for _, piece in run.pieces)
    starts, at = [], 0  # of each line in the text
    for paragraph in text.split("\n"):
        rest = at
        for line in textwrap.wrap(paragraph, COLUMNS, drop_whitespace=True) or [""]:
            begin = text.index(line, rest) if line else rest
            starts.append((begin, begin + len(line)))
            rest = begin + len(line)
        at += len(paragraph) + 1
    found, at = [], 0
    for seconds, piece in run.pieces:
        for row, (begin, end) in enumerate(starts):
            low, high = max(at, begin), min(at + len(piece), end)
            part = text[low:high]
            if part.strip():
                indent = len(part) - len(part.lstrip())
                found.append((seconds, row, low - begin + indent, part.strip()))
        at += len(piece)
    return found


def drawn(runs: list[Recording], about: str) -> str:
    """The picture: a panel for each recording, and a line about the model and the machine."""
    panels = [placed(run) for run in runs]
    rows = 1 + max(row for panel in panels for _, row, _, _ in panel)
    height = 78 + LINE * (rows + 3.5)
    length = SLOWER * max(run.seconds for run in runs) + PAUSE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="ui-monospace,Menlo,Consolas,DejaVu Sans Mono,monospace" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#111827"/>',
        *(f'<circle cx="{x}" cy="18" r="5" fill="#4b5563"/>' for x in (20, 36, 52)),
        "<title>The same answer, written without drafts and with M2R2</title>",
        f'<text x="76" y="22" fill="#9ca3af">{QUESTIONS[0]}</text>',
        f'<text x="{WIDTH - MARGIN}" y="22" text-anchor="end" fill="#9ca3af">'
        f"{SLOWER} times slower than real time</text>",
        f'<path d="M{WIDTH / 2} 36V{height - 40}" stroke="#374151"/>',
        f'<text x="{MARGIN}" y="{height - 16}" fill="#9ca3af">{about}</text>',
    ]
    for number, (run, panel) in enumerate(zip(runs, panels, strict=True)):
        left = number * WIDTH / 2 + MARGIN
        color = ("#e5e7eb", "#fdba74")[number]
        parts.append(
            f'<text x="{left}" y="54" fill="{color}" font-weight="bold">{run.title}</text>'
        )
        parts.append('<g fill="#d1d5db">')
        for seconds, row, column, text in panel:
            x, y = left + LETTER * column, 80 + LINE * row
            spread = f'textLength="{LETTER * len(text):.1f}" lengthAdjust="spacingAndGlyphs"'
            parts.append(
                f'<text x="{x:.1f}" y="{y}" {spread}>{escape(text)}'
                f"{appears(SLOWER * seconds, length)}</text>"
            )
        speed = (
            f"{run.tokens} tokens in {run.seconds:.2f} s: {run.tokens / run.seconds:.0f} tokens/s"
        )
        parts.append(
            f'</g><text x="{left}" y="{80 + LINE * (rows + 1)}" fill="{color}">{speed}'
            f"{appears(SLOWER * run.seconds, length)}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def appears(seconds: float, length: float) -> str:
    """An element's animation: it is seen after so many seconds of each round of `length`."""
    at = f"{min(seconds / length, 1):.4f}"
    return (
        f'<animate attributeName="opacity" values="0;1" keyTimes="0;{at}" calcMode="discrete" '
        f'dur="{length:.2f}s" repeatCount="indefinite"/>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/demo.svg"))
    parser.add_argument("--max-new-tokens", type=int, default=96)
    wanted = parser.parse_args()
    loaded = load(None, "bfloat16", "cpu")
    runs = [
        record(loaded, PLAIN, "multirate without drafts", wanted.max_new_tokens),
        record(
            loaded,
            recommended(),
            "M2R2 + text lookup",
            wanted.max_new_tokens,
        ),
    ]
    texts = {"".join(piece for _, piece in run.pieces) for run in runs}
    assert len(texts) == 1, "the two answers differ"
    machine = provenance.collect()
    about = (
        f"SmolLM2-135M-Instruct in bfloat16, greedy, {machine['threads']} threads of an "
        f"{processor(machine)}, {machine['date'][:10]}"
    )
    wanted.out.write_text(drawn(runs, about))
    for run in runs:
        print(f"{run.title}: {run.tokens / run.seconds:.0f} tokens/s")


if __name__ == "__main__":
    main()
