"""What the code cites exists in the repository."""

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
