"""What the code and the pages cite exists in the repository."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CITATION = re.compile(r"[\w./-]+\.md\b(?:, point (\d+))?")


def test_every_document_and_point_that_the_code_cites_exists() -> None:
    cited = 0
    for path in sorted((ROOT / "src").rglob("*")):
        if path.suffix not in (".py", ".c", ".h"):
            continue
        for found in CITATION.finditer(path.read_text()):
            name = found.group(0).split(",")[0]
            if name == "README.md" or name.endswith("/README.md"):  # of a folder that is written
                continue
            document = ROOT / name
            assert document.exists(), f"{path} cites {name}"
            if found.group(1):
                points = re.findall(r"^(\d+)\. ", document.read_text(), re.MULTILINE)
                assert found.group(1) in points, f"{path} cites {found.group(0)}"
            cited += 1
    assert cited


PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "lab/notes").glob("*.md"),
    ROOT / "lab/results/README.md",
]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)")
SCRIPT = re.compile(r"\b(?:bash|python) ((?:lab|benchmarks)/[\w./-]+)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NAMED_FILE = re.compile(r"`([\w./-]+\.(?:py|c|h|sh|md|json))`")
FOLDERS = ("", "src/multirate", "src/multirate/csrc", "src/multirate/runtime", "docs")
WRITTEN = ("out.json", "calibration.json", "tuned.json", "results.json", "report.html")
"""Files that a reader's own commands write."""


def test_every_file_that_a_page_names_exists() -> None:
    skipped = {".git", ".venv"}
    names = {p.name for p in ROOT.rglob("*") if not skipped & set(p.relative_to(ROOT).parts)}
    found = 0
    for page in PAGES:
        text = page.read_text()
        for link in LINK.findall(text):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name} links to {link}"
                found += 1
        for name in NAMED_FILE.findall(text):
            if name in WRITTEN:
                continue
            places = [ROOT / folder / name for folder in FOLDERS]
            exists = name in names if "/" not in name else any(one.exists() for one in places)
            assert exists, f"{page.name} names {name}, which does not exist"
            found += 1
    assert found > 50


def test_every_script_that_a_page_runs_exists() -> None:
    scripts = {name: page for page in PAGES for name in SCRIPT.findall(page.read_text())}
    assert scripts
    for name, page in scripts.items():
        assert (ROOT / name).exists(), f"{page.name} runs {name}"


def test_the_results_page_links_to_its_own_headings() -> None:
    text = (ROOT / "lab/results/README.md").read_text()
    anchors = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(text)
    }
    linked = set(re.findall(r"\]\(#([\w-]+)\)", text))
    assert linked
    assert linked <= anchors
