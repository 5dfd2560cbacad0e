"""Processes that are killed: what they leave is whole, and the same call goes on with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import fresh_process
import pytest
import torch
from safetensors.torch import load_file

KILLED = """
import os, signal, sys
from multirate.training.loop import train
from multirate.training.settings import TrainSettings

model, data, out, writes = sys.argv[1:]
left, replace = int(writes), os.replace
def replace_or_die(*places, **named):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(*places, **named)
os.replace = replace_or_die
settings = TrainSettings(
    steps=6, tokens_per_batch=512, max_length=64, warmup_steps=2, heldout_samples=4,
    precision="fp32", seed=1, checkpoint_steps=1,
)
print(train(model, [data], out, settings=settings, options={"rank": 8, "arla_dim": 8}).steps)
"""


def run(model: Path, data: Path, out: Path, dies_at_write: int) -> int:
    """The exit status of a training that is killed as its n-th file is to appear (0: never)."""
    arguments = [str(model), str(data), str(out), str(dies_at_write)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return fresh_process.run(KILLED, *arguments, env=environment, timeout=600).returncode


@pytest.mark.slow
def test_a_killed_training_goes_on_to_the_same_weights(
    tmp_path: Path, model_dir: Path, data: Path
) -> None:
    assert run(model_dir, data, tmp_path / "whole", 0) == 0
    out = tmp_path / "parts"
    # within its second checkpoint, and the last file but one of the result
    for write in (2, 8):
        assert run(model_dir, data, out, write) == -signal.SIGKILL
        assert not (out / "accelerator.json").exists()
    assert run(model_dir, data, out, 0) == 0
    whole, parts = (
        load_file(folder / "accelerator.safetensors") for folder in (tmp_path / "whole", out)
    )
    assert whole.keys() == parts.keys()
    for name in whole:
        assert torch.equal(whole[name], parts[name]), name
