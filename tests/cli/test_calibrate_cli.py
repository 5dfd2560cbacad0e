"""`multirate calibrate`, and what `generate` and `bench` do with its guarantee."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lab.bench import tiny_model

from multirate.loading.hub import load_model
from multirate.methods._shared.shape import BaseShape
from multirate.methods.spec import find_training
from multirate.training.checkpoint import Accelerator, describe_base

from .test_cli import plain_answer, refused, run

ENOUGH = 10  # prompts for a quality of 0.7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model.save(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "heldout.jsonl"
    records = [{"instruction": f"question {i}", "output": "x"} for i in range(ENOUGH)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def accelerator(base: str, folder: Path, **options: object) -> str:
    torch.manual_seed(0)
    model, kind = load_model(base, "float32").model, find_training("m2r2-carry")
    shape = BaseShape.of(model.config)
    config = kind.config_for(shape, rank=4, **options)
    made = Accelerator("m2r2-carry", config, kind.build(config, shape), describe_base(model))
    made.save_pretrained(folder)
    return str(folder)


def test_from_calibration_to_a_guarantee_kept(model: str, data: str, tmp_path: Path) -> None:
    folder = accelerator(model, tmp_path / "acc")
    dynamic = ["generate", model, "-a", folder, "-p", "hi", "-n", "12", "--mode", "dynamic"]
    refused(run(*dynamic, "--quality", "0.7"), "no calibration is stored", "multirate calibrate")
    given = ["calibrate", model, "-a", folder, "--data", data, "-n", "6"]
    made = run(*given, "--quality", "0.7", "--quality", "0.6")
    assert made.stdout.index("at most 30% of") < made.stdout.index("at most 40% of")
    assert made.exit_code == 0, (made.output, made.exception)
    assert "at most 30% of the tokens differ" in made.stdout and "calibration.json" in made.stdout
    assert "threshold" in made.stderr
    out = run(*dynamic, "--quality", "0.7", "--stats")
    assert out.exit_code == 0, (out.output, out.exception)
    assert "note: measured agreement: with 95% confidence, at most 30%" in out.stderr
    assert "tokens by the number of layers they used: " in out.stderr
    sampled = run(*dynamic, "--quality", "0.7", "--temperature", "1", "--seed", "1")
    assert "note: the calibration does not cover sampled text" in sampled.stderr
    penalised = run(*dynamic, "--quality", "0.7", "--repetition-penalty", "1.2")
    assert "note: the calibration does not cover text with penalties" in penalised.stderr
    assert run(*dynamic, "--quality", "1").stdout == plain_answer() + "\n"
    refused(run(*dynamic, "--quality", "0.9"), "reaches a quality of 0.9", "stored: 0.7, 0.6")
    for quality in ("0", "1.5", "nan", "-1"):
        refused(run(*dynamic, "--quality", quality), "quality is", "above 0 and at most 1")

    questions = tmp_path / "question.jsonl"
    questions.write_text(json.dumps({"question_id": 1, "category": "c", "turns": ["hi"]}) + "\n")
    bench = ["bench", model, "--data", str(questions), "-a", folder, "-n", "8", "--repeats", "1"]
    lossy = "m2r2-carry:quality=0.7"
    out_file = tmp_path / "out.json"
    measured = run(
        *bench,
        "--methods",
        f"autoregressive,{lossy}",
        "--dtype",
        "float32",
        "--json",
        str(out_file),
    )
    assert measured.exit_code == 0, (measured.output, measured.exception)
    assert "% kept" in measured.stdout and "(lossy)" in measured.stdout
    rows = {row["method"]: row for row in json.loads(out_file.read_text())["rows"]}
    assert 0 <= rows[lossy]["kept"] <= 1 and "agreement" in rows[lossy]["note"]
    assert rows["autoregressive"]["kept"] is None

    path = Path(folder) / "calibration.json"
    stored = json.loads(path.read_text())
    for field, wrong, reason in (
        ("base", "x", "made for another base model"),
        ("gates", [2], "made for another set of gates"),
        ("accelerator", "x", "made for other weights"),
        ("quality", 7, "quality is 7"),
    ):
        changed = {**stored, "guarantees": [{**stored["guarantees"][0], field: wrong}]}
        path.write_text(json.dumps(changed))
        refused(run(*dynamic, "--quality", "0.7"), reason)


def test_what_calibrate_refuses(model: str, data: str, tmp_path: Path) -> None:
    folder = accelerator(model, tmp_path / "acc")
    given = ["calibrate", model, "-a", folder, "--data", data]
    refused(run(*given), "10 different prompts", "needs at least 324")
    for quality in ("0", "2", "nan"):
        refused(run(*given, "--quality", quality), "quality is")
    refused(run(*given, "--quality", "1"), "quality 1 is lossless")
    refused(run(*given, "--quality", "0.7", "--confidence", "1"), "confidence is 1.0")
    refused(run(*given[:-1], str(tmp_path / "none.jsonl")), "none.jsonl")
    blind = accelerator(model, tmp_path / "blind", arla_dim=0)
    by_agreement = ("--option", "exit_score=arla")
    refused(
        run("calibrate", model, "-a", blind, "--data", data, *by_agreement), "accelerator with ARLA"
    )
    assert not list(Path(blind).glob("calibration*"))
