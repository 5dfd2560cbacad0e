"""The mixture in lab/: with its experts on disk it answers as it does in memory, and its predictor
finds more experts than the next layer's gate.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lab_files import MIXTURE
from transformers import AutoModelForCausalLM

import multirate
from multirate.engine import PLAIN
from multirate.errors import UserError
from multirate.experts.pack import pack
from multirate.experts.store import ExpertStore
from multirate.loading.chat_template import encode_chat
from multirate.runtime.native.moe import NativeMoEDecoder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("store")
    pack(MIXTURE, path, str(MIXTURE))
    return path


def test_it_says_the_same_with_experts_on_disk(store: Path) -> None:
    record = ExpertStore.open(store).index.record.bytes
    whole: Any = AutoModelForCausalLM.from_pretrained(MIXTURE).eval()
    texts = []
    arms = [
        (None, "lru"),
        (5 * record, "on_demand"),
        (150 * record, "accelerated"),
        (150 * record, "aot"),
    ]
    if NativeMoEDecoder.supports(whole) is not None:  # nobody else runs its attention ahead
        with pytest.raises(UserError, match="attention=false"):
            multirate.attach(str(MIXTURE), experts=store, expert_policy="accelerated")
        del arms[2]
    for memory, policy in arms:
        engine = multirate.attach(
            str(MIXTURE), experts=store, expert_memory=memory, expert_policy=policy
        )
        assert engine.experts is not None and engine.experts.trained_predictor is not None
        ids = encode_chat(engine.tokenizer, [{"role": "user", "content": "Tell me about a dog."}])
        texts.append(engine.generate([ids], stop=engine.stopping(40), method=PLAIN).sequences[0])
        assert engine.experts.runtime is not None
        recall = engine.experts.runtime.stats.recall
        assert (recall > 0.3) == (policy == "accelerated") or policy == "aot"
        engine.experts.remove()
    assert all(text == texts[0] for text in texts) and len(texts[0]) > 10
    logits = whole(engine_input(ids, texts[0])).logits[0, len(ids) - 1 : -1]
    best = logits.max(-1).values
    chosen = logits.gather(1, engine_input(texts[0], [])[0][:, None])[:, 0]
    assert (best - chosen).max() < 0.25, (
        "ours keeps the stream in fp32, transformers rounds it: near-ties only"
    )


def engine_input(*parts: list[int]) -> Any:
    import torch

    return torch.tensor([[token for part in parts for token in part]])


def test_the_predictor_beats_the_gate_by_its_own_card() -> None:
    results = json.loads((MIXTURE / "predictor" / "accelerator.json").read_text())["results"]
    assert results["terms"]
    for term, gate in zip(results["terms"], results["early_exit"]["terms"], strict=True):
        assert term["agreement"] > gate["agreement"]
