"""A page: one self-contained HTML file, which works offline and on a phone."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from multirate.errors import UserError

_HERE = "multirate.lab.pages"
_STYLE = "base.css"
MARK = '<meta name="generator" content="multirate">'
"""Every page has this near its beginning."""
PAGE = "a page that multirate wrote"


def is_page(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return MARK.encode() in file.read(1 << 12)
    except OSError:
        return False


def check_installed() -> None:
    """UserError if a package that draws pages is not installed."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"drawing the page needs {error.name or error}, which is not installed: "
            "pip install 'multirate[inspect]'"
        ) from None


def text_of(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def render(package: str, template: str, style: str | None = None, **values: Any) -> str:
    """Renders a package's template. It extends page.html.jinja, which needs `title`, `lead`
    (figures and their labels) and `facts` (by name), and can import parts.html.jinja. style: the
    package's own CSS, after that of all pages. UserError if a package that draws it is missing.
    """
    check_installed()
    import jinja2

    loader = jinja2.FunctionLoader(lambda name: text_of(_HERE, name))
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    look = text_of(_HERE, _STYLE) + ("" if style is None else text_of(package, style))
    page: str = environment.from_string(text_of(package, template)).render(
        style=look, mark=MARK, **values
    )
    return page


def facts(about: Mapping[str, Any]) -> dict[str, str]:
    """What a page says of its making. about: as provenance.collect gives it."""
    argv: Sequence[str] = about["argv"]
    commit = "" if about.get("commit") is None else f" ({str(about['commit'])[:12]})"
    return {
        "date": str(about["date"]),
        "machine": f"{about.get('cpu', '')}, {about['device']}, {about['threads']} threads",
        "versions": f"multirate {about['version']}{commit}, torch {about['torch']}, "
        f"transformers {about['transformers']}, Python {about['python']}",
        "command": shlex.join([Path(argv[0]).name, *argv[1:]]),
    }


def script_json(content: Any) -> str:
    """JSON that is safe inside a <script> element."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
