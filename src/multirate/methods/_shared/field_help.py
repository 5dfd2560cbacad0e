"""The help of a configuration's fields: the text below each of them in the source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import Any, get_type_hints

from multirate.json_values import spell


@dataclass(frozen=True)
class Setting:
    """A field, as a table shows it."""

    name: str
    accepted: str
    help: str
    default: str = ""


@cache
def field_help(config: type) -> dict[str, str]:
    """Field → help, on one line. A field without a text has its base class's."""
    found = {}
    for owner in reversed(config.__mro__):
        if not is_dataclass(owner):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for field, below in pairwise(tree.body):
            text = below.value if isinstance(below, ast.Expr) else None
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Constant):
                found[ast.unparse(field.target)] = " ".join(str(text.value).split())
    return found


def settings_of(config: Any) -> list[Setting]:
    """The fields of a configuration, in their order."""
    hints, texts = get_type_hints(config), field_help(config)
    return [
        Setting(
            field.name,
            _accepted(hints[field.name]),
            texts.get(field.name, ""),
        )
        for field in fields(config)
    ]


def _accepted(hint: Any) -> str:
    said = spell(hint).replace(" of at most 63 bits", "")
    for one in ("whole number", "number"):
        said = said.replace(f"a list of a {one}", f"a list of {one}s")
    return said
