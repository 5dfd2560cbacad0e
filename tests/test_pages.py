"""The pages: short where they should be, linked, and the site builds from them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
NOTES = sorted((ROOT / "lab" / "notes").glob("*.md"))
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([\w-]+))?\)")
READ_HERE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS, *(ROOT / "lab").glob("*/*.md")]


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get, as GitHub makes them."""
    titles = HEADING.findall(page.read_text())
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "name, lines", [("README.md", 90), ("CHANGELOG.md", 60), *((n, 150) for n in NOTES)]
)
def test_pages_keep_to_their_length(name, lines):
    assert len((ROOT / name).read_text().splitlines()) <= lines


def test_the_readme_has_at_most_800_words_and_one_table_of_seven_rows():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 800
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert sum(set(row) <= set("|-: ") for row in rows) == 1
    assert len(rows) - 2 <= 7


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_each_page_says_whom_it_is_for_and_leads_on(page):
    lines = [line for line in page.read_text().splitlines() if line]
    assert lines[0].startswith("# ")
    assert lines[1].startswith("*For ")
    assert LINK.search(lines[-1]), "the last line links to the pages before and after"


@pytest.mark.parametrize("page", READ_HERE, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_pages_and_headings_that_exist(page):
    for link, anchor in LINK.findall(page.read_text()):
        target = (page.parent / link).resolve() if link else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name} links to {link}#{anchor}"


def test_every_page_is_reached_from_the_readme():
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        waiting += [(page.parent / link).resolve() for link, _ in LINK.findall(page.read_text())]
    assert not {*DOCS, *NOTES} - seen


def test_the_site_builds_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env={"NO_MKDOCS_2_WARNING": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ("index.html", "quickstart/index.html", "lab/results/index.html"):
        assert (tmp_path / page).exists()
