"""lab/results/README.md and the README's table, written from the committed result files alone.

python benchmarks/render_results.py          # rewrite them
python benchmarks/render_results.py --check  # exit 1 when they and the results differ
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable

from render import (  # beside this file
    dynamic,
    engine,
    experts,
    lossless,
    readme,
    serving,
    suites,
    training,
)
from render.common import DOCS, RESULTS, ROOT

BEGIN, END = "<!-- results: benchmarks/render_results.py -->", "<!-- /results -->"
"""Around the part of the README that is written here."""
SECTIONS = (
    lossless.lossless,
    suites.other_suites,
    training.equal_training,
    suites.published,
    lossless.other_engines,
    lossless.newer_processor,
    serving.under_load,
    training.layerskip,
    dynamic.dynamic_compute,
    dynamic.exit_signals,
    dynamic.batches,
    engine.plain_loop,
    engine.families,
    experts.from_disk,
    experts.layer_shapes,
    experts.batches,
)
INTRODUCTION = (
    "# Measured results",
    "*For researchers who want the figures behind the README, or want to repeat a run.*",
    "`python benchmarks/render_results.py` writes this page from the JSON files beside it; do not "
    "edit it. Each file holds every row of its run, the settings, the package versions and the "
    "command (`argv`).",
)
READING = (
    "## How to read the tables",
    "Unless a section says otherwise, the model is SmolLM2-135M-Instruct (from a 4-bit GGUF file) "
    "in bf16, batch 1, greedy.",
    "- **Prompt**: one turn of a conversation. MT-Bench's 80 questions have two turns each; *all* "
    "is those 160 prompts without loops.",
    "- **Speedup**: tokens per second over multirate's plain loop in the same run, prompts "
    "included.",
    "- **Drafts alone**: without text lookup. In brackets: tokens per pass of the model.",
    "- **+ lookup**: drafts are combined with text lookup in the prompt and the output "
    "(`lookup=sam`).",
    "- **Same text**: answers identical to the plain loop's, over all runs of a row. A "
    "*near-tie* is a difference where two logits are equal within bf16 rounding.",
    "- **Loops**: where loops are left out, prompts that plain decoding answers with endless "
    "repetition are not counted, because they flatter drafts.",
    "- Each figure is one run on a shared machine and varies by about 5%. Compare within a table, "
    "not between tables.",
    "- Rows of November 2026 that a quantised copy of the model helped are in the files, but not "
    "in the tables: [it was removed](../notes/two-stage-verification.md).",
    "- In commands, EVAL and DATA are folders of data sets that you download; the first lines of "
    "each script list them. `question.jsonl` is the suite's question file.",
)
LINKS = (
    "---",
    "[Notes on what was tried](../notes/README.md) · "
    f"[choosing a method]({DOCS}/choosing-a-method.md) · [how it works]({DOCS}/how-it-works.md) · "
    f"[why the text is the same]({DOCS}/lossless.md)",
)


CODE_OR_LINK = re.compile(r"`[^`]+`|\[[^\]]*\]\([^)]*\)")


def wrapped(part: str) -> str:
    """A paragraph or a line of a list in lines of 118 characters, no code or link broken."""
    whole = CODE_OR_LINK.sub(lambda found: found[0].replace(" ", "\0"), part)
    indent = "  " if part.startswith("- ") else ""
    return textwrap.fill(
        whole, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ).replace("\0", " ")


def join(parts: Iterable[str]) -> str:
    """One text: tables and code as they are, no empty line between the lines of a list."""
    text, last = "", ""
    for part in parts:
        text += "\n" if part.startswith("- ") and last.startswith("- ") else "\n\n" if text else ""
        text += part if part.startswith(("|", "```", "<!--")) else wrapped(part)
        last = part
    return text


def page() -> str:
    """lab/results/README.md."""
    sections = [make() for make in SECTIONS]
    contents = [f"- [{one.title}](#{one.anchor})" for one in sections]
    parts = [*INTRODUCTION, *contents, *READING]
    for one in sections:
        parts += [f"## {one.title}", *one.parts]
    return join([*parts, *LINKS]) + "\n"


def main() -> None:
    readme_path = ROOT / "README.md"
    text = readme_path.read_text()
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{readme_path.name} has no {BEGIN} … {END} section")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    block = join([BEGIN, *readme.block(), END])
    wanted = {readme_path: before + block + after, RESULTS / "README.md": page()}
    for path, content in wanted.items():
        if "--check" not in sys.argv:
            path.write_text(content)
        elif not path.exists() or path.read_text() != content:
            name = path.relative_to(ROOT)
            raise SystemExit(f"{name} differs from lab/results: run benchmarks/render_results.py")


if __name__ == "__main__":
    main()
