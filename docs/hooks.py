"""What mkdocs needs to build a site from pages that are also read in the repository.

The README is the site's home page, and the pages of lab/ are part of the site. Links between them
are those of the repository: here they are rewritten for the site, and a link to a file that is no
page (code, data) becomes its path as code.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
HOME = "index.md"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
PICTURE = re.compile(r"!\[([^\]]*)\]\((?!\w+:)docs/([^)\s]+)\)")


def site_path(path: str) -> str | None:
    """A repository path as a path of the site's sources; None: it is not on the site."""
    if path == "README.md":
        return HOME
    if path.endswith(".md") and path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path.endswith(".md") and path.startswith("lab/") else None


def pages_of(folder: Path, top: Path) -> list[str]:
    """The pages of a folder, relative to `top`: its index, the pages that the index's tables do not
    list, and the others in the order of the tables.
    """
    rows = [row for row in (folder / "README.md").read_text().splitlines() if row[:1] == "|"]

    def place(page: Path) -> tuple[bool, int, str]:
        listed = (number for number, row in enumerate(rows) if f"({page.name})" in row)
        return page.name != "README.md", next(listed, -1), page.name

    return [str(page.relative_to(top)) for page in sorted(folder.glob("*.md"), key=place)]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the navigation's sections whose pages are found by folder."""
    found = {
        "Methods": pages_of(ROOT / "docs" / "methods", ROOT / "docs"),
        "Notes": pages_of(ROOT / "lab" / "notes", ROOT),
    }
    for entry in config.nav or []:
        for title in found.keys() & entry.keys() if isinstance(entry, dict) else ():
            entry[title] = found[title]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as the home page, and the pages of lab/."""
    files.append(File.generated(config, HOME, content=(ROOT / "README.md").read_text()))
    for folder in ("results", "notes"):
        for name in pages_of(ROOT / "lab" / folder, ROOT):
            files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Take lab/ out of the documentation's chain of previous and next pages."""
    lab = [page for page in nav.pages if page.file.src_uri.startswith("lab/")]
    before, after = lab[0].previous_page, lab[-1].next_page
    if before and after:
        before.next_page, after.previous_page = after, before
    lab[0].previous_page = lab[-1].next_page = None
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page from repository paths to paths of the site."""
    source = page.file.src_uri
    if source == HOME:
        here = ""
    else:
        here = posixpath.dirname(source if source.startswith("lab/") else f"docs/{source}")

    def rewritten(found: re.Match[str]) -> str:
        text, link, anchor = found.group(1), found.group(2), found.group(3) or ""
        path = posixpath.normpath(posixpath.join(here, link))
        if (ROOT / path).is_dir():
            path = posixpath.join(path, "README.md")
        target = site_path(path)
        if target is None or (files.get_file_from_path(target) is None and (ROOT / path).exists()):
            return f"`{path}`"
        return f"[{text}]({posixpath.relpath(target, posixpath.dirname(source) or '.')}{anchor})"

    return LINK.sub(rewritten, PICTURE.sub(r"![\1](\2)", markdown))
