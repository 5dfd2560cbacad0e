"""A limit of ours is not told as the model's: a longrope model is run up to its original length."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lab.bench import tiny_model
from transformers import Phi3Config, Phi3ForCausalLM

import multirate
from multirate import errors
from multirate.decoding.prefill import score
from multirate.decoding.stopping import StopSettings
from multirate.engine import Engine, attach
from multirate.errors import Notice, UserError
from multirate.training.own_answers import Questions, answer_questions

ORIGINAL, CLAIMED = 48, 192
LIMIT = f"the first {ORIGINAL} of the model's {CLAIMED} positions"


def longrope() -> Any:
    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "long_factor": [1.5 + i for i in range(8)],
        "short_factor": [1 + i / 8 for i in range(8)],
        "original_max_position_embeddings": ORIGINAL,
    }
    config = Phi3Config(
        vocab_size=261,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        max_position_embeddings=CLAIMED,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=rope,
    )
    return Phi3ForCausalLM(config).eval()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(errors, "_said", set())
    return attach(longrope(), tokenizer=tiny_model.tokenizer())


def test_a_text_that_is_cut_off_says_whose_limit_it_is(engine: Engine) -> None:
    prompt = list(range(5, 5 + ORIGINAL - 10))
    out = engine.generate([prompt], stop=engine.stopping(30))
    assert out.finish_reasons == ["context"]
    assert engine.notice is not None and f"cut off after {LIMIT}" in engine.notice
    engine.generate([prompt], stop=engine.stopping(5))
    assert engine.notice is None
    with pytest.raises(UserError, match=LIMIT):
        engine.generate([list(range(5, 5 + ORIGINAL + 1))])
    with pytest.raises(UserError, match=LIMIT):
        score(engine.decoder, prompt, prompt)


def test_a_limit_of_the_models_own_is_its_context() -> None:
    engine = attach(tiny_model.model(max_position_embeddings=16, eos_token_id=None))
    out = engine.generate([[7] * 10], stop=engine.stopping(30))
    assert out.finish_reasons == ["context"]
    assert engine.decoder.info.context == "the model's context of 16 tokens"
    assert engine.notice == "cut off after the model's context of 16 tokens"
    assert engine.generate([[7] * 16]).sequences == [[]]
    assert engine.notice == "cut off after the model's context of 16 tokens"
    engine.generate([[7] * 10], stop=engine.stopping(3))
    assert engine.notice is None
    out = engine.generate([[7] * 10], stop=StopSettings(context_limit=12))
    assert out.finish_reasons == ["context"] and engine.notice is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_models_own_loop_goes_on_with_is_not_called_cut_off(dtype: torch.dtype) -> None:
    model = longrope().to(dtype)
    call = multirate.custom_generate(backend="hf")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.generate(
            torch.arange(5, 15)[None],
            max_new_tokens=ORIGINAL,
            do_sample=False,
            custom_generate=call,
        )
    said = " ".join(str(one.message) for one in caught)
    assert "is left to the model's own generate" in said and "cut off" not in said


def test_custom_generate_goes_on_as_the_model_does() -> None:
    model = longrope()
    ids = torch.arange(5, 5 + ORIGINAL - 10)[None]
    options = {"max_new_tokens": 30, "do_sample": False}
    want = model.generate(ids, **options)
    with pytest.warns(UserWarning, match=f"beyond {LIMIT} is left to the model's own generate"):
        got = model.generate(ids, **options, custom_generate=multirate.custom_generate())
    assert got.equal(want)


def test_questions_without_room_are_not_left_out_in_silence(engine: Engine, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    asked = [Questions(("hi",)), Questions(("so " * 30,))]
    with pytest.warns(
        Notice, match=f"skipping questions .1 of 2: it leaves no room for 20 tokens in {LIMIT}"
    ):
        answer_questions(engine.decoder, engine.tokenizer, asked, out, [], max_new_tokens=20)
    assert [json.loads(line)["instruction"] for line in out.read_text().splitlines()] == ["hi"]


def test_an_evaluation_that_cuts_prompts_says_whose_limit_it_is(engine: Engine) -> None:
    harness = pytest.importorskip("multirate.lab.evaluation.harness_model")
    from multirate.lab.evaluation.modes import Mode, decoding

    model = harness.EngineLM(engine, decoding(engine, Mode()))
    with pytest.warns(Notice, match=f"truncated on the left.*{LIMIT}"):
        model._score(list(range(5, 105)), [7, 8])
