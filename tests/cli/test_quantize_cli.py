"""`quantize`, then a command that takes the file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from loading.gguf import tiny_files
from typer.testing import CliRunner, Result

from multirate.cli.main import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def done(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def refused(result: Result, *parts: str) -> None:
    assert result.exit_code == 2, (result.output, result.exception)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and all(part in last for part in parts), last


@pytest.mark.slow
def test_a_model_is_written_measured_and_run(tmp_path: Path) -> None:
    out = tmp_path / "tiny.gguf"
    said = done("tiny", out, "--type", "q8_0")
    found = re.search(r"perplexity ([\d.]+) → ([\d.]+) .* at ([\d.]+)% of [\d,]+ positions", said)
    assert found and str(out) in said
    full, quantised, same = map(float, found.groups())
    assert abs(quantised / full - 1) < 0.01 and 95 < same <= 100
    shown = CliRunner().invoke(app, ["info", "tiny", "--weights", "q8_0"])
    cost = re.search(r"cost of weights +perplexity ([\d.]+)", shown.output)
    assert cost and abs(float(cost[1]) / full - 1) < 0.01
    on_load = CliRunner().invoke(
        app, ["generate", "tiny", "-p", "hi", "-n", "4", "--weights", "q8_0"]
    )
    assert "`multirate info tiny --weights q8_0` measures" in on_load.stderr
    answer = CliRunner().invoke(app, ["generate", str(out), "-p", "hi", "-n", "4"])
    assert answer.exit_code == 0, (answer.output, answer.exception)
    assert "perplexity" not in done("tiny", out, "--force", "--no-check")
    again = tmp_path / "again.gguf"
    said = done(out, again, "--type", "q4_0", "--no-check")
    assert "tiny.gguf is quantised already (Q8_0)" in said
    assert again.stat().st_size < out.stat().st_size


def test_mistakes_are_said_before_a_model_is_loaded(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    refused(run("nowhere/none/x", out, "--type", "q3_k"), "'q3_k'", "q8_0, q4_0, q4_1, f16, bf16")
    refused(run("tiny", tmp_path / "m.bin"), "must end in .gguf")
    refused(run("tiny", tmp_path / "no" / "m.gguf"), "cannot write")
    tiny_files.write(out)
    before = out.read_bytes()
    refused(run("tiny", out), str(out), "--force")
    refused(run(out, out, "--force"), "is the file to read")
    assert out.read_bytes() == before and [*tmp_path.iterdir()] == [out]
