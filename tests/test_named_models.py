"""The tiny model of this package is small, and what was trained for it drafts for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lab_files import DRAFT_MODEL, TEXTS

import multirate
from multirate.decoding.speculate.given_texts import given_texts
from multirate.engine import PLAIN, attach
from multirate.loading.chat_template import encode_chat
from multirate.loading.hub import load_model, reference_accelerators
from multirate.loading.names import NAMED

QUESTIONS = ("How do noise-cancelling headphones work?", "Write a short story about a fox.")
TINY_BYTES = 2_000_000


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load_model("tiny", dtype="float32")


def test_the_tiny_model_is_tiny() -> None:
    folder = NAMED["tiny"].folder
    assert folder is not None
    sizes = [path.stat().st_size for path in folder.parent.rglob("*") if path.is_file()]
    assert sum(sizes) <= TINY_BYTES


def test_the_draft_model_has_the_vocabulary_that_it_drafts_for() -> None:
    """And is much smaller than what it drafts for."""
    config = json.loads((DRAFT_MODEL / "config.json").read_text())
    assert config["vocab_size"] == 49_152
    assert (DRAFT_MODEL / "model.safetensors").stat().st_size < 16_000_000


def test_the_texts_have_the_vocabulary_that_they_are_drafts_for() -> None:
    assert given_texts(str(TEXTS)).vocabulary == 49_152


def test_the_package_is_small() -> None:
    """Its wheel has at most 40 MB; weights do not compress."""
    files = [path for path in Path(multirate.__file__).parent.rglob("*") if path.is_file()]
    weights = [path for path in files if path.suffix == ".safetensors"]
    assert sum(path.stat().st_size for path in weights) < 36_000_000


@pytest.mark.parametrize("name", ["m2r2", "m2r2-carry", "kangaroo"])
def test_its_accelerators_draft_what_it_says(loaded: Any, name: str) -> None:
    """Its text is the model's own, and its drafts are accepted, as a broken one's would not be."""
    engine = attach(loaded, reference_accelerators("tiny")[name])
    tokens = steps = 0
    for question in QUESTIONS:
        ids = encode_chat(loaded.tokenizer, [{"role": "user", "content": question}])
        plain, drafted = (
            engine.generate([ids], stop=engine.stopping(64), method=method, speculate="always")
            for method in (PLAIN, name if name == "kangaroo" else f"{name}:lookup=0")
        )
        assert drafted.sequences == plain.sequences
        tokens += drafted.stats.tokens - drafted.stats.first_tokens
        steps += drafted.stats.sequence_steps
    assert tokens / steps > 1.3
