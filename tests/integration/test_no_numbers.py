"""Drafts of an accelerator whose weights have become no numbers leave the text the model's own."""

from __future__ import annotations

import pytest
import torch

from multirate import attach
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.speculate.acceptance_statistics import Calibration
from multirate.loading.hub import load_model, reference_accelerators
from multirate.training.checkpoint import Accelerator


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("backend", ["auto", "hf"])
@pytest.mark.parametrize("name", sorted(reference_accelerators("tiny")))
def test_the_text_is_the_models_own(name: str, backend: str, value: float) -> None:
    # in bf16, PyTorch's sums depend on the number of rows
    loaded = load_model("tiny", dtype="float32" if backend == "hf" else "auto")
    made = Accelerator.from_pretrained(reference_accelerators("tiny")[name], loaded.model)
    with torch.no_grad():
        for parameter in made.module.parameters():
            parameter.fill_(value)
    engine = attach(loaded, backend=backend)
    prompt, stop = [[3, 50, 70], [4, 51]], engine.stopping(12)
    for temperature in (0.0, 1.0):
        sampling = SamplingSettings(temperature=temperature, seed=3)
        want = engine.generate(prompt, sampling, stop, method="autoregressive").sequences
        if made.method not in engine.methods():
            engine.add(made)
        got = engine.generate(prompt, sampling, stop, method=made.method, speculate="always")
        assert got.sequences == want


def test_a_confidence_that_is_no_number_counts_as_none() -> None:
    calibration = Calibration()
    calibration.observe([float("nan"), float("inf"), -1.0], 1)
    assert calibration.tries.sum() == 2 and calibration.tries[0] == 1
