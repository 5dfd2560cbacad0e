"""`multirate eval` as users call it."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from lab.evaluation import tiny_data

from .test_cli import refused, run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_data.write(tmp_path_factory.mktemp("data")))


def needs_harness() -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'multirate[eval]'")


@pytest.mark.slow
def test_scores_in_every_mode(data: str, tmp_path: Path) -> None:
    needs_harness()
    out = tmp_path / "out.json"
    given = ["eval", "tiny", "--tasks", "e2e_nlg,dialogsum", "--data", data, "--limit", "2"]
    written = {}
    for name, more in {
        "full": [],
        "speculative": ["-a", "m2r2-carry", "--speculate", "always"],
        "dynamic": ["-a", "m2r2-carry", "--mode", "dynamic", "--threshold", "0"],
    }.items():
        done = run(*given, *more, "--json", str(out))
        assert done.exit_code == 0, (done.output, done.exception)
        assert f"tiny, {name}: " in done.stdout and "slot_error_rate" in done.stdout
        assert ("lossy" in done.stdout) == (name == "dynamic")
        written[name] = json.loads(out.read_text())
        assert written[name]["mode"] == name and written[name]["samples"]["dialogsum"] == 2
    full, speculative, dynamic = written.values()
    assert full["tasks"] == speculative["tasks"] and full["answers"] == speculative["answers"]
    assert set(full["tasks"]["e2e_nlg"]) == {"bleu", "slot_error_rate"}
    assert speculative["decoding"]["tokens_per_step"] > 1.1 and not dynamic["lossless"]
    assert dynamic["answers"] != full["answers"] and dynamic["decoding"]["exits"]
    text = json.dumps(full)
    assert tiny_data.DIALOGUE not in text and "The Mill has" not in text  # the data is not kept


def test_the_accelerator_is_the_models_own_and_unused_in_full_mode(data: str) -> None:
    needs_harness()
    given = ["eval", "tiny", "--tasks", "e2e_nlg", "--data", data, "--limit", "1"]
    done = run(*given, "--mode", "speculative")
    assert done.exit_code == 0 and "speculative: m2r2-carry" in done.stdout
    done = run(*given, "--mode", "full", "-a", "m2r2-carry")
    assert done.exit_code == 0 and "mode full does not use --accelerator m2r2-carry" in done.stderr


def test_what_eval_refuses(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_harness()
    monkeypatch.delenv("MULTIRATE_EVAL_DATA", raising=False)
    out = tmp_path / "out.json"
    given = ["eval", "tiny", "--json", str(out), "--tasks"]
    of_data = [*given, "e2e_nlg", "--data", data]
    refused(run("eval", "tiny"), "--tasks names no task", "dialogsum, e2e_nlg, wikisql")
    refused(run(*given, "wikisql"), "needs its data", "--data", "MULTIRATE_EVAL_DATA")
    refused(run(*given, "wikisql", "--data", str(tmp_path)), "wikisql.json.bz2", str(tmp_path))
    refused(run(*given, "wikisql", "--data", str(tmp_path / "no")), "there is no folder")
    refused(run(*given, str(tmp_path / "no.yaml")), "there is no task file", "accepted: dialogsum")
    refused(run(*of_data, "--limit", "0"), "--limit is 0: at least 1")
    refused(run(*of_data, "--shots", "-1"), "--shots is -1: at least 0")
    refused(run(*of_data, "--shots", "99"), "task e2e_nlg has 4 examples")
    refused(run(*of_data, "--mode", "fast"), "accepted: full, speculative, dynamic")
    refused(run(*of_data, "--mode", "dynamic"), "either a quality or a threshold")
    refused(run(*of_data, "--quality", "0.9"), "needs mode 'dynamic'")
    dynamic = [*of_data, "--mode", "dynamic"]
    refused(run(*dynamic, "--quality", "2", "-a", "m2r2-carry"), "quality is 2.0")
    refused(run(*dynamic, "--quality", "0.5", "-a", "m2r2-carry"), "no calibration")
    refused(run(*dynamic, "--threshold", "0.5", "-a", "kangaroo"), "no dynamic mode", "m2r2-carry")
    refused(run(*of_data, "-a", str(tmp_path)), "is not an accelerator")
    refused(run(*of_data[:3], str(tmp_path), *of_data[4:]), "it is a folder")
    refused(run(*of_data, "--speculate", "maybe"), "accepted: auto, always, never")
    (tmp_path / "broken.yaml").write_text("task: [")
    refused(run(*given, str(tmp_path / "broken.yaml")), "broken.yaml cannot be loaded")
    assert not out.exists()


@pytest.mark.slow
def test_an_unknown_task(data: str) -> None:
    needs_harness()
    refused(
        run("eval", "tiny", "--tasks", "wikisqll", "--data", data),
        "task 'wikisqll' is unknown; accepted: dialogsum, e2e_nlg, wikisql, a task's YAML file",
    )


def test_ctrl_c_writes_nothing(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_harness()
    from multirate.engine import Engine

    right, calls = Engine.generate, 0

    def interrupted(self: Engine, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            signal.raise_signal(signal.SIGINT)
        return right(self, *arguments, **named)

    monkeypatch.setattr(Engine, "generate", interrupted)
    out = tmp_path / "out.json"
    done = run("eval", "tiny", "--tasks", "dialogsum", "--data", data, "--json", str(out))
    assert done.exit_code == 130 and "interrupted" in done.stderr and calls == 2
    assert "rouge1" not in done.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["lm_eval", "sacrebleu", "rouge_score"])
def test_without_the_extra(data: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing != "lm_eval":
        needs_harness()
    monkeypatch.setitem(sys.modules, missing, None)
    refused(
        run("eval", "tiny", "--tasks", "wikisql", "--data", data),
        f"{missing.replace('_eval', '-eval').replace('_score', '-score')} is not installed",
        "pip install 'multirate[eval]'",
    )
