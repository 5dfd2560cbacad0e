"""The code blocks of documentation pages run."""

from __future__ import annotations

import re
from pathlib import Path

from fresh_process import run

DOCS = Path(__file__).parents[1] / "docs"


def code_blocks(page: str) -> list[str]:
    """The Python code blocks of a page."""
    text = (DOCS / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_method_of_extending_works(tmp_path: Path) -> None:
    module, use, *_ = code_blocks("extending.md")
    (tmp_path / "follower.py").write_text(module)
    # a process of its own: a registered method would be every other test's as well
    code = f"import sys\nsys.path.insert(0, sys.argv[1])\n{use}"
    done = run(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = re.search(r"([\d.]+) tokens per step", done.stdout)
    assert found and float(found[1]) > 1
