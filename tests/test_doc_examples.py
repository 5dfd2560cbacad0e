"""The code blocks of documentation pages run."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

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


def test_the_loop_of_how_it_works_is_lossless() -> None:
    (block,) = code_blocks("how-it-works.md")
    names: dict[str, Any] = {}
    exec(block, names)

    def next_token(text: list[int]) -> int:
        return (7 * sum(text[-3:]) + len(text) % 3) % 5

    def model(text: list[int], draft: list[int]) -> list[int]:
        return [next_token(text + draft[:n]) for n in range(len(draft) + 1)]

    plain = [1, 2]
    while len(plain) < 100:
        plain.append(next_token(plain))
    draw = random.Random(0)
    drafted = names["speculative_decode"](
        model,
        lambda text: [draw.randrange(5) for _ in range(3)],
        [1, 2],
        lambda text: len(text) >= 100,
    )
    assert drafted[:100] == plain
