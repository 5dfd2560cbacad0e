"""A bench run as one self-contained page, made only from the run's JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multirate import provenance
from multirate.io import check_folder, check_writable, write_atomically, write_json
from multirate.lab.bench.other_processes import NOTABLE
from multirate.lab.bench.report_figures import fastest, figures, step_cost
from multirate.lab.bench.seen_prompts import UNKNOWN, warnings_of
from multirate.lab.pages import page
from multirate.methods.spec import PLAIN

TEMPLATE, STYLE = "report.html.jinja", "report.css"
JSON, PAGE = "results.json", "report.html"


@dataclass(frozen=True)
class Shade:
    """A cell of the table of categories. strength: 0 to 1, the distance from 1.0x. faster: whether
    it is above 1.0x.
    """

    text: str
    strength: float
    faster: bool


def check(folder: Path) -> None:
    """UserError if the folder cannot be written or has other files of these names, or if a package
    that draws the page is not installed.
    """
    page.check_installed()
    check_folder(folder)
    if folder.is_dir():
        check_writable(folder / JSON, provenance.RESULTS, provenance.collected)
        check_writable(folder / PAGE, page.PAGE, page.is_page)


def write(folder: Path, content: Mapping[str, Any]) -> Path:
    """Writes results.json and report.html to `folder`, and makes it if needed → the page."""
    rendered = render(content)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / JSON, dict(content))
    write_atomically(folder / PAGE, rendered)
    return folder / PAGE


def render(content: Mapping[str, Any]) -> str:
    """The page of a run's JSON. UserError if a package that draws it is not installed."""
    rows, kinds = content["rows"], _kinds(content)
    return page.render(
        "multirate.lab.bench",
        TEMPLATE,
        STYLE,
        title=title(content),
        lead=_lead(content),
        heads=HEADS,
        rows=[_cells(content, row) for row in rows],
        drawn=figures(content),
        kinds=kinds,
        by_kind=[
            (row["method"], [_shade(row, kind, rate) for kind, rate in kinds.items()])
            for row in rows
            if row.get("categories")
        ],
        accelerators=_accelerators(content),
        notes=_notes(content),
        facts=_facts(content),
        baseline=content["baseline"],
        best=(fastest(content) or {"method": None})["method"],
    )


def title(content: Mapping[str, Any]) -> str:
    drawn = content.get("temperature")
    how = "greedy" if drawn is None else f"temperature {drawn:g}"
    task = f" ({content['task']})" if content.get("task") else ""
    batch = content.get("batch", 1)
    return (
        f"{content['model']} on {content['suite']}{task}, {content['dtype']}, batch {batch}, {how}"
    )


HEADS = (
    "method",
    "tokens/s",
    "speedup",
    "spread",
    "tokens per pass",
    "cost of a step",
    "accepted",
    "predicted",
    "same text",
)


def _cells(content: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    cost, predicted = step_cost(content, row), content.get("predicted", {}).get(row["method"])
    return [
        row["method"],
        f"{row['tokens_per_second']:.1f}",
        "withheld" if row["speedup"] is None else f"{row['speedup']:.2f}x",
        f"{100 * row['spread']:.0f}%",
        _or_dash(row["tokens_per_step"], "{:.2f}"),
        _or_dash(cost, "{:.2f}"),
        _or_dash(row["acceptance"], "{:.0%}"),
        _or_dash(predicted, "{:.2f}x"),
        _answers(content, row),
    ]


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _answers(content: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    if not row["lossless"]:
        kept = row.get("kept")
        if kept is None:
            return "lossy"
        said = f"lossy, {100 * kept:.1f}% of tokens kept, perplexity {row['perplexity']:.2f}"
        repeats = row.get("repeats", 0.0)
        return said if repeats < 0.005 else f"{said}, {100 * repeats:.0f}% in loops"
    parts = [f"{row['identical']} of {content['prompts']} identical"]
    parts += [f"{row['near_ties']} near-ties"] if row["near_ties"] else []
    parts += [f"{row['diverged']} WRONG"] if row["diverged"] else []
    return ", ".join(parts)


def _lead(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    found, best = [], fastest(content)
    if best is not None:
        found.append(
            (f"{best['speedup']:.2f}x", f"speedup of the fastest lossless method, {best['method']}")
        )
    plain = next((row for row in content["rows"] if row["method"] == PLAIN), None)
    if plain is not None:
        found.append((f"{plain['tokens_per_second']:.0f}", "tokens per second with plain decoding"))
    share = content.get("plain_share_of_bandwidth")
    if share is not None:
        found.append((f"{share:.0%}", "of the memory bandwidth used by plain decoding"))
    found.append((str(content["prompts"]), "prompts, answered by every method"))
    return found


def _kinds(content: Mapping[str, Any]) -> Mapping[str, float]:
    """The baseline's tokens/s in each category of the suite; empty if there are fewer than two."""
    reference = next((r for r in content["rows"] if r["method"] == content["baseline"]), None)
    known: dict[str, float] = {} if reference is None else reference.get("categories") or {}
    return known if len(known) > 1 else {}


def _shade(row: Mapping[str, Any], category: str, rate: float) -> Shade:
    own = (row.get("categories") or {}).get(category)
    if own is None or row["speedup"] is None:
        return Shade("–", 0.0, True)
    speedup = own / rate
    return Shade(f"{speedup:.2f}x", min(abs(speedup - 1), 1.0), speedup >= 1)


def _accelerators(content: Mapping[str, Any]) -> list[list[str]]:
    """Name, parameters, training tokens and training minutes of each accelerator in the run."""
    return [
        [
            name,
            f"{about['parameters'] / 1e6:.1f}M",
            f"{about['tokens'] / 1e6:.1f}M",
            f"{about['minutes']:.0f}",
        ]
        for name, about in content.get("accelerators", {}).items()
    ]


def _notes(content: Mapping[str, Any]) -> list[str]:
    notes = [f"{row['method']}: {row['note']}" for row in content["rows"] if row["note"]]
    missing = [f"No row for {one['method']}: {one['reason']}" for one in content["unavailable"]]
    if content["interrupted"]:
        missing.append("The run was interrupted: the results cover the finished part.")
    if content["skipped"]:
        missing.append(
            f"{len(content['skipped'])} questions do not fit the context and were left out."
        )
    seen = content.get("trained_on_questions", {})
    unknown = [
        f"{name}: it is unknown whether it was trained on these questions."
        for name, about in seen.items()
        if about == UNKNOWN
    ]
    return [*notes, *(f"{warning}." for warning in warnings_of(seen)), *unknown, *missing]


def _facts(content: Mapping[str, Any]) -> dict[str, str]:
    made, others = page.facts(content), content.get("other_processes_used", 0)
    loops: Sequence[str] | None = content.get("loops")
    bandwidth = content["read_bandwidth_bytes_per_second"] / 1e9
    made["machine"] += f", {bandwidth:.1f} GB/s memory bandwidth"
    if others > NOTABLE:
        made["machine"] += f"; other processes used {others:.1f} processors during the run"
    made["versions"] += f", backend {content['backend']}"
    questions = (
        f"{content['prompts']} prompts of {Path(content['data']).name}, up to "
        f"{content['max_new_tokens']} new tokens each, {content['repeats']} measured repeats"
    )
    if loops:
        questions += f"; {len(loops)} more were left out because they repeat in loops"
    return {"questions": questions, **made}
