"""Without a terminal, long work says now and then where it is."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from multirate.cli import progress as cli_progress
from multirate.training import progress
from multirate.training.loop import train
from multirate.training.progress import TrainProgress, duration

from .test_loop import OPTIONS, settings


def test_a_line_has_step_loss_speed_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 10.0, 39.0, 40.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    shown = TrainProgress(100, 0, True, Console(file=out))
    shown.advance(10, 5000)
    shown.report(10, "loss 1.234")
    assert out.getvalue() == "step 10/100  loss 1.234  500 tok/s  1:30 left\n"
    assert not shown.due()
    assert not shown.due()
    assert shown.due()
    assert duration(3723.2) == "1:02:03"


def test_long_steps_are_reported_before_log_every(
    tmp_path: Path,
    model_dir: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "SAY_EVERY", 0.0)
    train(model_dir, [data], tmp_path, settings=settings(steps=2, log_every=50), options=OPTIONS)
    assert "step 1/2  loss" in capfd.readouterr().err


def test_answers_write_lines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_progress, "SAY_EVERY", 0.0)
    with cli_progress.Bar("answering") as lines:
        lines.to(16, 48)
        lines.to(32, 48)
    said = capfd.readouterr().err.splitlines()
    assert said[0] == "answering: 16 of 48"
    assert re.fullmatch(r"answering: 32 of 48, [0-9.e+]+/s, 0:00 left", said[1])
