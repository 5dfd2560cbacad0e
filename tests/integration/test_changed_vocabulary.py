"""A vocabulary that is made smaller or larger under an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from multirate import attach
from multirate.errors import UserError
from multirate.loading.hub import load_model

PROMPT = [[5, 6, 7, 8, 9, 10, 5, 6, 7]]


@pytest.mark.parametrize("size", [512, 1100])
@pytest.mark.parametrize("backend", ["auto", "hf"])
def test_an_accelerator_of_another_vocabulary_is_refused(backend: str, size: int) -> None:
    loaded = load_model("tiny", "bfloat16" if backend == "auto" else "float32")
    engine = attach(loaded, "m2r2-carry", backend=backend)
    stop = engine.stopping(12)
    engine.generate(PROMPT, stop=stop, speculate="always")
    loaded.model.resize_token_embeddings(size)
    for _ in range(2):
        with pytest.raises(UserError, match=f"does not fit .*: vocab_size {size} instead of 1024"):
            engine.generate(PROMPT, stop=stop, speculate="always")
    expected = attach(loaded.model, backend=backend).generate(PROMPT, stop=stop).sequences
    for method in ("autoregressive", "prompt_lookup"):
        found = engine.generate(PROMPT, stop=stop, method=method, speculate="always")
        assert found.sequences == expected
    with pytest.raises(UserError, match=f"outside 0..{size - 1}"):
        engine.generate([[size]], method="autoregressive")


@pytest.mark.parametrize("backend", ["auto", "hf"])
@pytest.mark.parametrize("rows", [1000, 1030])
def test_a_head_of_another_size_than_the_vocabulary_is_refused(backend: str, rows: int) -> None:
    """The kernel would read beyond it, or leave tokens out."""
    loaded = load_model("tiny", "bfloat16")
    model: Any = loaded.model
    weight = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(torch.ones(rows, weight.shape[1], dtype=weight.dtype))
    with pytest.raises(UserError, match=f"a vocabulary of 1024, but its head gives {rows} logits"):
        attach(model, backend=backend)
