"""The README, the results page and the methods' pages show what the committed results and the
settings' help say; their commands exist.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from multirate.cli.main import app

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("script", ["render_results.py", "render_settings.py"])
def test_tables_are_what_their_sources_say(script: str):
    if not (ROOT / "lab/results/mt_bench_smollm2.json").exists():
        pytest.fail(
            "lab/results/mt_bench_smollm2.json is missing: the README's figures have no source"
        )
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["README.md", "lab/results/README.md"])
def test_every_multirate_command_of_a_page_exists(page: str):
    text = (ROOT / page).read_text()
    used = set(re.findall(r"(?:^|`|&& )multirate (\w+)", text, flags=re.MULTILINE))
    assert used
    for command in used:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
