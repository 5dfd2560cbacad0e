"""Architectures beside those of tiny_models.py, which nothing in the package names: found by their
structure alone, plain decoding and drafts say what `generate` says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from multirate.decoding.stopping import StopSettings
from multirate.engine import Engine
from multirate.runtime.load import load_decoder

from .tiny_models import SHAPE, prompts, randomised

_GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4, "n_positions": 96}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
MORE: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "codegen": _GPT,
    "cohere": {},
    "cohere2": {},
    "cwm": {},
    "ernie4_5": {},
    "exaone4": {},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 96},
    "gpt_neox": {},
    "gptj": _GPT,
    "granite": {},
    "granitemoe": _EXPERTS,
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {},
    "olmo": {},
    "olmo3": {},
    "persimmon": {},
    "phi": {},
    "phimoe": _EXPERTS,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 24},
    "seed_oss": {"head_dim": 8},
    "smollm3": {},
    "starcoder2": {},
    "vaultgemma": {"head_dim": 8},
}


@pytest.mark.parametrize("name", MORE)
def test_the_text_is_that_of_generate(name: str) -> None:
    config = tf.AutoConfig.for_model(name, **{**SHAPE, **MORE[name]})
    model = randomised(config, seed=len(name))
    (prompt,) = prompts(11)
    with torch.no_grad():
        text = model.generate(prompt[None], max_new_tokens=20, do_sample=False)
    assert len(set(text[0, 11:].tolist())) > 3  # a text that can tell models apart
    engine = Engine(model, load_decoder(model))
    for method in ("autoregressive", "prompt_lookup", "layerskip"):
        output = engine.generate(
            [prompt.tolist()], stop=StopSettings(20), method=method, speculate="always"
        )
        assert output.sequences[0] == text[0, 11:].tolist(), method
