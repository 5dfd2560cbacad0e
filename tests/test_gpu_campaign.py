"""benchmarks/gpu_campaign.py end to end on tiny models: every part, an error recorded, resumed."""

from __future__ import annotations

import json
import runpy
import signal
from pathlib import Path

import fresh_process
import pytest

from multirate.lab.bench.prompts import Prompt
from multirate.lab.bench.runner import Answer, MethodRun, measure

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
    *("correctness", "decoding 1", "decoding 4", "answers", "training m2r2-carry"),
    *("shape 1b", "experts"),
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
    rows = parts["decoding 4"]["result"]["batches"]["4"]["rows"]
    own = ["kangaroo", "m2r2", "m2r2-carry:lookup=0", "m2r2-carry"]
    assert [row["method"] for row in rows] == ["generate", "autoregressive", "sam", *own]
    assert not any(row["diverged"] for row in rows)
    assert (tmp_path / "accelerators" / "m2r2-carry" / "accelerator.safetensors").is_file()
    assert parts["training m2r2-carry"]["result"]["batches"]["1"]["rows"][1]["diverged"] == 0
    assert parts["experts"]["result"]["rows"] and content["argv"] and content["torch"]
    assert set(parts) == set(PARTS)
    again, same = campaign(tmp_path, *only)
    assert again == 0 and same["parts"] == parts


@pytest.mark.slow
def test_a_part_that_fails_is_recorded_and_the_next_goes_on(tmp_path: Path) -> None:
    only = ("--only", "training m2r2", "--only", "shape 1b")  # no answers to train on yet
    code, content = campaign(tmp_path, *only)
    assert code == 1 and content["parts"]["shape 1b"]["status"] == "done"
    assert "own.jsonl" in content["parts"]["training m2r2"]["error"]
    _, content = campaign(tmp_path / "late", "--minutes", "0", "--only", "answers")
    assert content["parts"]["answers"]["status"].startswith("out of time")


def test_at_the_end_of_a_part_finished_answers_are_kept() -> None:
    names = runpy.run_path(str(ROOT / "benchmarks" / "gpu_campaign.py"), run_name="campaign")
    asked: list[int] = []

    def run(prompt: list[int]) -> Answer:
        asked.extend(prompt)
        if len(asked) == 3:
            signal.raise_signal(signal.SIGALRM)
        return Answer(prompt)

    prompts = [Prompt(str(i), [i]) for i in range(4)]
    before = signal.getsignal(signal.SIGALRM)
    with names["_interrupted_after"](60):
        found = measure([MethodRun("autoregressive", run)], prompts, repeats=1, warmup=0)
    assert found.interrupted and len(found.usable()[0]) == 2
    with pytest.raises(names["Ended"]), names["_interrupted_after"](60):
        signal.raise_signal(signal.SIGALRM)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
