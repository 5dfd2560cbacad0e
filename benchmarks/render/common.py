"""What every section needs: the committed files, methods' names in words, and Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "lab" / "results"
DOCS = "../../docs"
"""From the page."""
PLAIN = "autoregressive"
COPIES = "2026-11-26", "2026-11-28T20"
"""When a quantised copy of the model verified drafts of single sequences first, unless a row's name
ended in `:staged=0` (lab/notes/two-stage-verification.md).
"""
COPY_SETTINGS = {"margin", "model_weights", "prompt_weights"}
"""Of rows that decoded with a quantised copy."""

NAMES = {
    "generate": "transformers `generate`",
    "generate-lookup": "transformers, its prompt lookup (10 tokens)",
    "generate-early-exit": "transformers, its early exit (7 of 30 layers draft)",
    "generate-assistant": "transformers, assisted by `smollm2-draft`",
    "llamacpp-bf16": "llama.cpp BF16",
    "llamacpp-q8_0": "llama.cpp Q8_0",
    "llamacpp-q4_0": "llama.cpp Q4_0",
    "llamacpp-bf16-lookup": "llama.cpp BF16, its prompt lookup (2 tokens)",
    "llamacpp-q8_0-lookup": "llama.cpp Q8_0, its prompt lookup (2 tokens)",
    "llamacpp-q4_0-lookup": "llama.cpp Q4_0, its prompt lookup (2 tokens)",
    PLAIN: "multirate, plain loop",
    "lookahead": "lookahead",
    "prompt_lookup": "prompt lookup",
    "sam": "text lookup (`sam`)",
    "token_recycling": "token recycling",
    "two_model": "two models",
    "layerskip": "LayerSkip",
    "medusa": "Medusa",
    "kangaroo": "Kangaroo",
    "hydra": "Hydra++",
    "eagle": "EAGLE",
    "eagle3": "EAGLE-3",
    "m2r2": "M2R2 near the paper's form (`m2r2`)",
    "m2r2-carry": "M2R2 (`m2r2-carry`)",
    "m2r2-carry-equal": "M2R2, equal training",
    "skipdecode": "SkipDecode",
    "calm": "CALM",
    "calm-classifier": "CALM, trained classifier",
    "lite": "LITE",
    "deed": "DEED",
    "free": "FREE",
    "specee": "SpecEE",
    "mixture_of_depths": "Mixture-of-Depths",
}
OTHERS = tuple(name for name in NAMES if name.startswith(("generate", "llamacpp")))
"""Rows of other engines."""
JOINED = ("m2r2-carry", "m2r2-carry-equal")
"""Methods that draft from text lookup as well unless `lookup=0` is set."""


@dataclass(frozen=True)
class Section:
    title: str
    parts: Sequence[str]
    """Paragraphs, tables and code blocks."""

    @property
    def anchor(self) -> str:
        """Of the heading, as GitHub and mkdocs write it."""
        kept = "".join(c for c in self.title.lower() if c.isalnum() or c in " -")
        return kept.replace(" ", "-")


PATHS = {"lab/models/smollm2-draft": "smollm2-draft", "lab/texts/smollm2.safetensors": "smollm2"}
"""Files that rows name: their path and their short name in tables."""


def load(name: str) -> dict[str, Any]:
    """A committed result, by its file's name without the ending. Rows name files by their paths in
    the repository; older ones by the short names that files had in the package. Rows that a
    quantised copy of the model helped are left out.
    """
    text = (RESULTS / f"{name}.json").read_text()
    for path, short in PATHS.items():
        text = text.replace(f"={path}", f"={short}")
    data = json.loads(text)
    if any("method" in row for row in data.get("rows", ())):
        data["rows"] = [row for row in data["rows"] if not _by_a_copy(data, row)]
        for row in data["rows"]:
            row["method"] = row["method"].removesuffix(":staged=0")
    return data


def _by_a_copy(data: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether a quantised copy of the model decoded a row, or verified its drafts first."""
    name, settings = split(row["method"])
    if name == "int8_weights" or settings.keys() & COPY_SETTINGS:
        return True
    drafts = row.get("lossless", True) and name != PLAIN and name.partition(" ")[0] not in OTHERS
    single = row.get("batch", data.get("batch")) == 1
    verified = COPIES[0] <= str(data["date"]) < COPIES[1] and "staged" not in settings
    return drafts and single and verified


def processor(data: dict[str, Any]) -> str:
    """The processor; for AMD EPYC with its generation, which its instructions tell apart."""
    features, cpu = data["cpu_features"], data["cpu"]
    if "avx512f" not in features:
        return f"{cpu} (no AVX-512)"
    if cpu == "AMD EPYC":
        return f"{cpu} (Zen {5 if 'avx_vnni' in features else 4})"
    name = cpu.replace("(R)", "").split(" Processor")[0]
    return f"{name} ({'AVX512-BF16' if 'avx512_bf16' in features else 'AVX-512'})"


def machine(data: dict[str, Any]) -> str:
    """The processor and the date."""
    return f"{processor(data)}, {str(data['date'])[:10]}"


def split(method: str) -> tuple[str, dict[str, str]]:
    """A row's method and its settings."""
    name, *settings = method.split(":")
    return name, dict(setting.split("=", 1) for setting in settings)


def joined(method: str) -> bool:
    """Whether a row's drafts are combined with text lookup."""
    name, settings = split(method)
    return settings.get("lookup", "sam" if name in JOINED else "0") != "0"


def label(method: str, link: bool = False) -> str:
    """A row's method in words. link: to its page."""
    name, settings = split(method)
    text = NAMES[name]
    if link:
        pages = {"m2r2-carry": "m2r2"}
        text = f"[{text}]({DOCS}/methods/{pages.get(name, name)}.md)"
    if settings.get("texts"):
        text += ", corpus included"
    return text + (" + lookup" if joined(method) else "")


def times(speedup: float | None) -> str:
    return "–" if speedup is None else f"{speedup:.2f}x"


def per_step(row: dict[str, Any] | None) -> str:
    """Speedup, and tokens per step in brackets."""
    return "–" if row is None else f"{times(row['speedup'])} ({row['tokens_per_step']:.2f})"


def speed_of(row: dict[str, Any] | None) -> str:
    return "–" if row is None else times(row["speedup"])


def same_text(rows: Sequence[dict[str, Any]], prompts: int) -> str:
    """How many answers are the plain loop's, and what the others are."""
    text = f"{sum(row['identical'] for row in rows)}/{len(rows) * prompts}"
    for kind in ("near_ties", "diverged"):
        if count := sum(row[kind] for row in rows):
            text += f", {count} {kind.replace('_', '-')}"
    return text


def all_same(*runs: dict[str, Any]) -> str:
    """A sentence: how many of our own answers in `runs` are the plain loop's."""
    rows = [(row, run["prompts"]) for run in runs for row in run["rows"] if _ours(row)]
    same, total = sum(row["identical"] for row, _ in rows), sum(count for _, count in rows)
    if same == total:
        return f"All {total:,} answers are identical to the plain loop's."
    return f"{same:,} of {total:,} answers are identical to the plain loop's."


def _ours(row: dict[str, Any]) -> bool:
    return row["method"].partition(" ")[0] not in OTHERS


def left_out(run: dict[str, Any]) -> str:
    """How many answers a run does not count because they end in loops."""
    loops = run.get("loops")
    return f" ({len(loops)} more end in loops)" if loops else ""


def setting(run: dict[str, Any]) -> str:
    """What was run, where and when."""
    return (
        f"{run['prompts']} prompts{left_out(run)}, up to {run['max_new_tokens']} new tokens, "
        f"{run['threads']} threads of an {machine(run)}."
    )


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    made = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*made, *(f"| {' | '.join(line)} |" for line in lines)])


def best_in_bold(lines: Sequence[tuple[str, Sequence[float | None]]]) -> list[list[str]]:
    """Lines of a table of speedups, the best of each column in bold."""
    best = [
        max((speed for speed in column if speed is not None), default=None)
        for column in zip(*(speeds for _, speeds in lines), strict=True)
    ]
    return [
        [
            name,
            *(
                f"**{times(speed)}**" if speed is not None and speed == top else times(speed)
                for speed, top in zip(speeds, best, strict=True)
            ),
        ]
        for name, speeds in lines
    ]


def sources(*names: str) -> str:
    """Links to the files that a section was written from."""
    return "Data: " + ", ".join(f"[{name}.json]({name}.json)" for name in names) + "."


def command(*lines: str) -> str:
    """A code block."""
    return "\n".join(["```bash", *lines, "```"])


def stored_command(name: str) -> str:
    """The code that prints the command that wrote a file."""
    return command(
        'python -c "import json, shlex, sys; print(shlex.join(json.load(open(sys.argv[1]))'
        f"['argv']))\" lab/results/{name}.json"
    )
