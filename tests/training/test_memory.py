"""A long run keeps the memory that it has after its first steps, whatever the shapes of its batches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, time
from multirate.training import loop
from multirate.training.settings import TrainSettings

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

advance, seen = loop.TrainProgress.advance, []
def watched(self, step, tokens):
    advance(self, step, tokens)
    seen.append(resident())
loop.TrainProgress.advance = watched
model, data, out = sys.argv[1:]
loop.train(model, [data], out, settings=TrainSettings(steps=240, tokens_per_batch=1000, max_length=120,
           heldout_samples=1, precision="bf16", warmup_steps=2), options={"rank": 8, "arla_dim": 8})
print(round(max(seen[80:100])), round(max(seen[220:])))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_batches_of_ever_new_shapes_do_not_grow_the_process(tmp_path: Path, model_dir: Path) -> None:
    data = tmp_path / "lengths.jsonl"
    answers = ["abcdefghij" * (1 + n % 10) + "a" * (n % 9) for n in range(999)]
    records = [{"prompt": "ab" * (n % 7), "completion": answer} for n, answer in enumerate(answers)]
    data.write_text("".join(json.dumps({**r, "prompt": f"{n} {r['prompt']}"}) + "\n" for n, r in enumerate(records)))
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(model_dir), str(data), str(tmp_path / "out")],
                          capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    early, late = map(int, done.stdout.split()[-2:])
    assert late < early + 60, f"{early} MB after 100 steps, {late} MB after 240"
