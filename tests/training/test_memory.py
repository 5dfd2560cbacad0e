"""A long run keeps the memory that it has after its first steps, whatever the shapes of its
batches.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import fresh_process
import pytest
import torch

from multirate.training.precision import low_precision

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
settings = TrainSettings(
    steps=48, tokens_per_batch=1000, max_length=120, heldout_samples=1, precision="bf16",
    warmup_steps=2,
)
loop.train(model, [data], out, settings=settings, options={"rank": 8, "arla_dim": 8})
print(round(seen[1]), round(max(seen)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(
    low_precision(torch.device("cpu")) != torch.bfloat16,
    reason="without bf16 products little is compiled, and nothing grows",
)
def test_batches_of_ever_new_shapes_do_not_grow_the_process(
    tmp_path: Path, model_dir: Path
) -> None:
    data = tmp_path / "lengths.jsonl"
    with data.open("w") as file:
        for n in range(999):
            record = {
                "prompt": f"{n} " + "ab" * (n % 7),
                "completion": "abcdefghij" * (1 + n % 10) + "a" * (n % 9),
            }
            file.write(json.dumps(record) + "\n")
    done = fresh_process.run(
        SCRIPT,
        *map(str, (model_dir, data, tmp_path / "out")),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    early, most = map(int, done.stdout.split()[-2:])
    assert most < early + 500, f"{early} MB after two steps, then up to {most} MB"
