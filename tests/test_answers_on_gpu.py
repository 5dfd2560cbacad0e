"""answers_on_gpu.py, a recipe: its step over static shapes against `generate`, on a CPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from script_file import load_script
from transformers import LlamaConfig, LlamaForCausalLM

END = 3


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("lab/recipes/smollm2/answers_on_gpu.py")


@pytest.fixture
def model() -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = END, 0
    return model


@torch.no_grad()
def test_answers_are_those_of_generate(script: ModuleType, model: Any) -> None:
    """Prompts of other lengths, more lanes than prompts, lanes used a second time."""
    weights = script.Weights(model, torch.device("cpu"))
    lanes = script.Lanes(weights, 5, 40, 24)
    draw = torch.Generator().manual_seed(2)
    ended = 0
    for lengths in ((4, 9, 1), (7, 2, 12, 5, 3)):
        prompts = [torch.randint(4, 40, (n,), generator=draw).tolist() for n in lengths]
        answers = script.answer(lanes, prompts, 20, END)
        for prompt, got in zip(prompts, answers, strict=True):
            ids = torch.tensor([prompt])
            said = model.generate(ids, max_new_tokens=20, do_sample=False)[0, len(prompt) :]
            expected = said.tolist()
            if END in expected:
                ended += 1
                expected = expected[: expected.index(END)]
            assert got == expected
    assert ended, "no answer ends before its limit: the test shows half of it"


@torch.no_grad()
def test_questions_follow_the_model(script: ModuleType, model: Any) -> None:
    """A sampled question is a likely continuation of the prefix at every token, and ends."""
    weights = script.Weights(model, torch.device("cpu"))
    prefix = [5, 6, 7]
    torch.manual_seed(0)
    questions = script.sample_questions(weights, prefix, {END}, wanted=12, count=4)
    assert len(questions) > 4 and any(questions)
    for question in questions[:8]:
        ids = torch.tensor([[*prefix, *question, END]])
        shares = model(ids).logits[0, len(prefix) - 1 : -1].log_softmax(-1)
        chosen = shares.gather(1, ids[0, len(prefix) :, None])[:, 0]
        assert bool((chosen >= shares.amax(-1) + script.LEAST_SHARE - 1e-3).all())
