"""The tables of settings in docs/methods, written from the help beside each field.

python benchmarks/render_settings.py          # rewrite them
python benchmarks/render_settings.py --check  # exit 1 when they and the fields differ

A table stands between `<!-- settings of METHOD, METHOD -->` and `<!-- /settings -->`; names after a
colon limit it to these settings. Settings on the page of common ones are left out elsewhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from multirate.methods._shared.branch_config import BranchDecodeConfig
from multirate.methods._shared.described import decoding_settings, training_settings
from multirate.methods._shared.field_help import Setting
from multirate.methods.spec import find

PAGES = Path(__file__).resolve().parent.parent / "docs" / "methods"
TABLE = re.compile(
    r"(<!-- settings of ([^:>]+?)(?:: ([^>]+?))? -->\n).*?(<!-- /settings -->)", re.S
)
COMMON = {one.name: one for one in decoding_settings(find("eagle"))}


def table(heading: str, methods: Sequence[str], settings: Iterable[Sequence[Setting]]) -> str:
    """One row for each setting, with its defaults in each of the methods."""
    found: dict[str, dict[str, Setting]] = {}
    for method, each in zip(methods, settings, strict=True):
        for one in each:
            found.setdefault(one.name, {})[method] = one
    if not found:
        return ""
    lines = [f"| {heading} | accepted | default | meaning |", "|---|---|---|---|"]
    for name, by_method in found.items():
        first = next(iter(by_method.values()))
        defaults = {method: one.default for method, one in by_method.items()}
        if len(set(defaults.values())) == 1 and len(defaults) == len(methods):
            default = first.default
        else:
            default = "; ".join(f"{method}: {value}" for method, value in defaults.items())
        cells = (f"`{name}`", first.accepted, default, first.help.replace("``", "`"))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def rendered(found: re.Match[str]) -> str:
    """A table's place, with the table."""
    methods = found[2].split(", ")
    named = found[3].split(", ") if found[3] else None
    specs = [find(method) for method in methods]

    def shown(one: Setting) -> bool:
        return one.name in named if named else COMMON.get(one.name) != one

    decoding = [[one for one in decoding_settings(spec) if shown(one)] for spec in specs]
    training = [[] if named else training_settings(spec) for spec in specs]
    parts = (
        table("training option", methods, training),
        table("decoding setting", methods, decoding),
    )
    return "\n".join((found[1], *filter(None, parts), found[4]))


def main() -> None:
    """Rewrites the pages, or checks them."""
    names = {name.strip() for found in TABLE.finditer(COMMON_PAGE) for name in found[3].split(",")}
    assert names == set(BranchDecodeConfig.names()), "the page of common settings shows all of them"
    wrong = []
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text()
        new = TABLE.sub(rendered, text)
        if new != text:
            wrong.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(new)
    if wrong and "--check" in sys.argv:
        sys.exit(f"run python benchmarks/render_settings.py: {', '.join(wrong)} differ")


COMMON_PAGE = (PAGES / "common-settings.md").read_text()

if __name__ == "__main__":
    main()
