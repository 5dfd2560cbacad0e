"""benchmarks/gpu_campaign.py end to end on tiny models: every part, an error recorded, resumed."""

from __future__ import annotations

import json
from pathlib import Path

import fresh_process
import pytest

ROOT = Path(__file__).resolve().parent.parent


CAMPAIGN = """
import os, runpy, sys
os.chdir(sys.argv.pop(1))
runpy.run_path("benchmarks/gpu_campaign.py", run_name="__main__")
"""


def campaign(out: Path, *arguments: str) -> tuple[int, dict]:
    words = ["--tiny", "--device", "cpu", "--out", str(out), *arguments]
    done = fresh_process.run(CAMPAIGN, str(ROOT), *words, timeout=600)
    return done.returncode, json.loads((out / "campaign.json").read_text())


# the other methods' training is the same part with another name
PARTS = (
    *("correctness", "decoding", "answers", "training m2r2-carry"),
    *("decoding 1b", "experts"),
)


@pytest.mark.slow
def test_every_part_runs_and_is_not_run_again(tmp_path: Path) -> None:
    only = [word for part in PARTS for word in ("--only", part)]
    code, content = campaign(tmp_path, *only)
    parts = content["parts"]
    failed = {name: part for name, part in parts.items() if part["status"] != "done"}
    assert code == 0 and not failed
    assert parts["correctness"]["result"]["other_tokens_than_generate"] == []
    assert parts["answers"]["result"]["records"] == 24
    methods = [row["method"] for row in parts["decoding"]["result"]["batches"]["4"]["rows"]]
    assert methods == ["generate", "autoregressive", "prompt_lookup"]
    assert (tmp_path / "accelerators" / "m2r2-carry" / "accelerator.safetensors").is_file()
    assert parts["training m2r2-carry"]["result"]["batches"]["1"]["rows"][1]["diverged"] == 0
    assert parts["experts"]["result"]["rows"] and content["argv"] and content["torch"]
    assert set(parts) == set(PARTS)
    again, same = campaign(tmp_path, *only)
    assert again == 0 and same["parts"] == parts


@pytest.mark.slow
def test_a_part_that_fails_is_recorded_and_the_next_goes_on(tmp_path: Path) -> None:
    only = ("--only", "training m2r2", "--only", "decoding")  # no answers to train on yet
    code, content = campaign(tmp_path, *only)
    assert code == 1 and content["parts"]["decoding"]["status"] == "done"
    assert "own.jsonl" in content["parts"]["training m2r2"]["error"]
    _, content = campaign(tmp_path / "late", "--minutes", "0", "--only", "answers")
    assert content["parts"]["answers"]["status"].startswith("out of time")
