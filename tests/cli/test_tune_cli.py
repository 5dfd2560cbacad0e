"""`multirate tune`, and that the other commands use what it found."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from multirate import tuned
from multirate.cli.main import app
from multirate.lab.bench import tune as bench_tune


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # this module's alone: an empty cache of everything would have the kernel compiled anew
    monkeypatch.setattr(tuned, "cache_folder", lambda: tmp_path / "multirate")
    return tmp_path


def test_what_was_tuned_is_used_and_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the defaults lose whatever the clock says
    monkeypatch.setattr(bench_tune, "_WORTH", 0.0)
    monkeypatch.setattr(bench_tune, "candidates", lambda known: [{}, {"tokens": 4}])
    speed = bench_tune.Tried.speed
    monkeypatch.setattr(
        bench_tune.Tried, "speed", property(lambda one: 9e9 if one.settings else speed.fget(one))
    )
    done = run("tune", "tiny", "--method", "prompt_lookup", "--minutes", "0.002", "-n", "4")
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 80
    assert list((cache / "multirate" / "tuned").iterdir())
    asked = ("generate", "tiny", "--method", "prompt_lookup", "-p", "hi", "-n", "3")
    said = run(*asked)
    assert said.exit_code == 0 and ": prompt_lookup:tokens=4" in said.stderr
    plain = run(*asked, "--no-tuned")
    assert "tuned" not in plain.stderr
    assert said.stdout == plain.stdout


@pytest.mark.parametrize(
    "arguments,part",
    [
        (("--minutes", "0"), "--minutes"),
        (("--method", "autoregressive"), "autoregressive"),
        (("--method", "nothing"), "nothing"),
    ],
)
def test_bad_input_is_one_sentence(cache: Path, arguments: tuple[str, ...], part: str) -> None:
    result = run("tune", "tiny", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and part in result.stderr
    assert result.stderr.count("\n") == 1


def test_interrupted_it_writes_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_tune, "tune", interrupted)
    assert run("tune", "tiny", "--method", "sam").exit_code == 130
    assert not (cache / "multirate" / "tuned").exists()
