"""What a model's generation_config asks for: followed as transformers' `generate` follows it, or
named in a line.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from lab.bench import tiny_model
from transformers import GenerationConfig, LogitsProcessorList

from multirate import errors
from multirate.decoding.logits import SamplingSettings
from multirate.engine import Engine, attach
from multirate.errors import UserError
from multirate.lab.bench.method_runs import method_run
from multirate.methods.spec import PLAIN

from .helpers import distribution

LONG = [5, 6, 7, 8, 9, 5, 6]
SHORT = [70, 71, 70]


def engine_with(tokenizer: bool = True, **asked: Any) -> Engine:
    model = tiny_model.model()
    model.generation_config.update(**asked)
    return attach(model, tokenizer=tiny_model.tokenizer() if tokenizer else None)


def said(engine: Engine, *arguments: Any, **options: Any) -> tuple[list[list[int]], str]:
    """The tokens, and what was said once."""
    errors._said.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = engine.generate(*arguments, **options).sequences
    return found, " ".join(str(one.message) for one in caught)


def theirs(engine: Engine, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return engine.model.generate(ids, **options)[0, len(prompt) :].tolist()


# The bare model continues LONG with 139, 37, 186, 39.
GREEDY: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 1},
    {"bad_words_ids": [[139], [37, 186]]},
    {"suppress_tokens": [139, 186]},
    {"begin_suppress_tokens": [139]},
    {"eos_token_id": [3, 139], "min_new_tokens": 3},
    {"eos_token_id": [3, 37], "min_length": 12},
    {"eos_token_id": [7, 3], "exponential_decay_length_penalty": (2, 1.9)},
    {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [139]},
]


@pytest.mark.parametrize("asked", GREEDY, ids=lambda asked: "-".join(asked))
@pytest.mark.parametrize("method", [PLAIN, "sam", "prompt_lookup"])
def test_greedy_text_is_that_of_transformers(asked: dict[str, Any], method: str) -> None:
    engine = engine_with(**asked)
    prompts = [LONG, SHORT]
    want = [theirs(engine, prompt, max_new_tokens=24) for prompt in prompts]
    options: dict[str, Any] = {"method": method, "speculate": "always"}
    found, words = said(engine, prompts, stop=engine.stopping(24), **options)
    assert found == want and not words
    bare = engine.generate(prompts, SamplingSettings(), engine.stopping(24), **options).sequences
    assert bare != want, "this model's text does not depend on what is asked"


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.7, "top_k": 5},
        {"top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2, "top_k": 0},
        {"temperature": 1.5, "no_repeat_ngram_size": 2, "suppress_tokens": [3, 4]},
    ],
)
def test_sampling_is_from_the_distribution_of_transformers(asked: dict[str, Any]) -> None:
    engine = engine_with(do_sample=True, **asked)
    _, words = said(engine, [LONG], stop=engine.stopping(2))
    assert "asks for sampling" in words and "greedy" in words
    config, _ = engine.model._prepare_generation_config(None)
    engine.model._prepare_special_tokens(config)
    ids, logits = torch.tensor([LONG]), 4 * torch.randn(1, 261)
    processors: LogitsProcessorList = engine.model._get_logits_processor(
        config, input_ids_seq_length=len(LONG), device="cpu"
    )
    want = processors(ids, logits.clone()).softmax(-1)
    got = distribution(logits, engine.sampling(), [LONG], [len(LONG)])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"num_beams": 4}, "num_beams 4"),
        ({"guidance_scale": 1.5, "max_time": 3.0}, "guidance_scale 1.5, max_time 3"),
        ({"sequence_bias": {(139,): -9.0}}, "sequence_bias"),
        ({"do_sample": True, "typical_p": 0.5}, "typical_p 0.5"),
    ],
)
def test_what_is_not_followed_is_said_once(asked: dict[str, Any], words: str) -> None:
    engine = engine_with(**asked)
    _, line = said(engine, [LONG], stop=engine.stopping(2))
    assert f"asks for {words}, which multirate ignores" in line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate([LONG], stop=engine.stopping(2))  # once
    _, line = said(engine, [LONG], SamplingSettings(), engine.stopping(2))
    assert not line  # the settings are the caller's own


def test_what_asks_for_nothing_says_nothing() -> None:
    below = dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens"), -1)
    neutral = {
        **below,
        "num_beams": 1,
        "typical_p": 0.5,
        "temperature": 0.6,
        "top_p": 0.9,
        "min_length": 0,
    }
    engine = engine_with(**neutral, cache_implementation="dynamic", bad_words_ids=[])
    found, line = said(engine, [LONG], stop=engine.stopping(9))
    assert (
        not line
        and found == engine.generate([LONG], SamplingSettings(), engine.stopping(9)).sequences
    )


def test_what_is_given_takes_the_place_of_what_is_asked() -> None:
    engine = engine_with(do_sample=True, temperature=0.6, top_p=0.9, repetition_penalty=1.3)
    got = engine.sampling(temperature=0.0, seed=3)
    assert got == SamplingSettings(0.0, 50, 0.9, 0.0, 1.3, 3) and got.greedy
    assert engine.sampling(top_p=1.0, repetition_penalty=1.0) == SamplingSettings(0.6, 50)
    engine = engine_with(temperature=0.6, top_p=0.9)
    assert engine.sampling(temperature=0.8) == SamplingSettings(0.8, top_p=0.9)


def test_lengths_and_stop_strings() -> None:
    engine = engine_with()
    long, short = engine.generate([LONG, SHORT], stop=engine.stopping(256)).sequences
    assert [len(one) for one in engine.generate([LONG]).sequences] == [len(long)]
    for asked, prompts, most in (
        ({"max_new_tokens": 5}, [LONG, SHORT], 5),
        ({"max_length": 12}, [LONG, SHORT], 5),
        ({"max_length": 12}, [SHORT], 9),
        ({"max_length": 12, "max_new_tokens": 3}, [SHORT], 3),
    ):
        got = engine_with(**asked).generate(prompts).sequences
        want = [long if prompt is LONG else short for prompt in prompts]
        assert got == [one[:most] for one in want]
    found, line = said(engine_with(max_length=7), [LONG])
    assert found == [long] and "ignoring max_length 7" in line and "a prompt of 7 tokens" in line
    text = tiny_model.tokenizer().decode(long)
    stop = next(c for c in text[2:] if c.isascii())
    engine = engine_with(stop_strings=[stop])
    (got,) = engine.generate([LONG], stop=engine.stopping(64)).sequences
    assert got == theirs(engine, LONG, max_new_tokens=64, tokenizer=engine.tokenizer) != long[:64]
    assert engine.generate([LONG], stop=engine.stopping(64, ())).sequences == [long[:64]]
    found, line = said(engine_with(tokenizer=False, stop_strings=[stop]), [LONG])
    assert "ignoring stop_strings" in line


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"do_sample": True, "top_p": 1.5}, "top_p is 1.5"),
        ({"repetition_penalty": "1.1"}, "repetition_penalty is '1.1'"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"max_length": "long"}, "max_length is 'long'"),
        ({"bad_words_ids": [["a"]]}, "bad_words_ids"),
        ({"bad_words_ids": [[9999]]}, "9999"),
        ({"eos_token_id": "</s>"}, "eos_token_id of the GenerationConfig is '</s>'"),
        ({"stop_strings": 5}, "the model's generation_config: stop_strings is 5"),
        ({"stop_strings": [""]}, "the model's generation_config: stop_strings is .''"),
        ({"suppress_tokens": 5}, "suppress_tokens is 5 and cannot be applied"),
        (
            {"exponential_decay_length_penalty": [2, "a"]},  # found out after two tokens
            "exponential_decay_length_penalty is .2, 'a'. and cannot be applied",
        ),
    ],
)
def test_values_that_cannot_be_followed_are_refused(asked: dict[str, Any], words: str) -> None:
    engine = engine_with()
    for name, value in asked.items():
        setattr(engine.model.generation_config, name, value)
    with pytest.raises(UserError, match=words):
        engine.generate([LONG])


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple])
def test_tokens_may_be_in_arrays(kind: Any) -> None:
    engine = engine_with(suppress_tokens=kind([139, 186]))
    found, _ = said(engine, [LONG], stop=engine.stopping(9))
    assert found == [theirs(engine, LONG, max_new_tokens=9)]


@pytest.mark.parametrize("ids", [3, [3], (3, 54), torch.tensor([3, 54]), [54, -1]])
def test_ends_of_text(ids: Any) -> None:
    engine = engine_with()
    engine.model.generation_config.eos_token_id = ids
    wanted = ids.tolist() if isinstance(ids, torch.Tensor) else ids
    wanted = [wanted] if isinstance(wanted, int) else list(wanted)
    assert list(engine.stopping().eos_token_ids) == [token for token in wanted if token >= 0]


def test_every_row_of_a_bench_is_of_the_bare_model() -> None:
    """Whatever the model's own config asks for; which is as it was afterwards."""
    asked = {"repetition_penalty": 1.3, "suppress_tokens": [139], "min_new_tokens": 9, "top_k": 3}
    ends = {"stop_strings": 5}  # whatever they are
    engine = engine_with(do_sample=True, num_beams=2, no_repeat_ngram_size=2, **asked, **ends)
    before = engine.model.generation_config
    want = attach(tiny_model.model()).generate([LONG], stop=engine.stopping(24, ())).sequences[0]
    for name in ("generate", PLAIN, "sam"):
        assert method_run(engine, name, 24).run(LONG).tokens == want
    assert engine.model.generation_config is before and isinstance(before, GenerationConfig)
