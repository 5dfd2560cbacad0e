"""The engine as the harness's model, against the harness's own model of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.bench import tiny_model
from multirate.decoding.logits import SamplingSettings
from multirate.engine import attach
from multirate.errors import UserError

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'multirate[eval]'")

from multirate.lab.evaluation.harness_model import EngineLM
from multirate.lab.evaluation.modes import Mode, decoding


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    """As much of the harness's requests as a model looks at."""
    return [SimpleNamespace(args=one) for one in arguments]


@pytest.fixture(scope="module")
def ours() -> EngineLM:
    engine = attach(tiny_model.model(), tokenizer=tiny_model.tokenizer())
    return EngineLM(engine, decoding(engine, Mode()))


@pytest.fixture(scope="module")
def theirs() -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=tiny_model.model(), tokenizer=tiny_model.tokenizer(), batch_size=1)


PAIRS = [
    ("hello there", " you"),
    ("hello there", " everybody in the room"),
    ("", "no context"),
    ("blanks at the end  ", "word"),
    ("long " * 120, "enough to be cut"),  # 600 tokens; the model's context is 512
]


def test_log_likelihoods(ours: EngineLM, theirs: Any) -> None:
    expected = theirs.loglikelihood(requests(*PAIRS), disable_tqdm=True)
    for ours_said, theirs_said in zip(ours.loglikelihood(requests(*PAIRS)), expected, strict=True):
        assert ours_said[0] == pytest.approx(theirs_said[0], rel=1e-4)
        assert ours_said[1] == theirs_said[1]


def test_log_likelihoods_of_whole_texts(ours: EngineLM, theirs: Any) -> None:
    texts = requests(("a short text",), ("a text in windows " * 50,))
    expected = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
    assert ours.loglikelihood_rolling(texts) == pytest.approx(expected, rel=1e-4)


def test_generated_text(ours: EngineLM, theirs: Any) -> None:
    free = ours.generate_until(requests(("hello", {"max_gen_toks": 40})))[0]
    stop = free[12:14]
    kwargs = {"max_gen_toks": 40, "do_sample": False, "temperature": 0.0}
    asked = requests(
        ("hello", {**kwargs, "until": []}),
        ("hello", {**kwargs, "until": [stop]}),
        ("and then " * 70, {**kwargs, "until": ["\n\n"]}),
    )
    said = ours.generate_until(asked)
    assert said == theirs.generate_until(asked, disable_tqdm=True)
    assert said[0] == free and said[1] == free.split(stop)[0]


def test_sampling_repeats_and_follows_the_settings(ours: EngineLM) -> None:
    kwargs = {"do_sample": True, "temperature": 1.0, "top_k": 20, "max_gen_toks": 12, "until": []}
    asked = requests(("hello", kwargs), ("hello", kwargs))
    first, second = ours.generate_until(asked)
    assert [first, second] == ours.generate_until(asked) and first != second
    ids = ours.tok_encode("hello")
    sampling = SamplingSettings(temperature=1.0, top_k=20, seed=1)
    output = ours.engine.generate([ids], sampling, ours.engine.stopping(12))
    assert second == tiny_model.tokenizer().decode(output.sequences[0], skip_special_tokens=True)


def test_settings_that_cannot_be_followed(ours: EngineLM) -> None:
    with pytest.raises(UserError, match="'num_beams'; accepted: temperature"):
        ours.generate_until(requests(("hello", {"num_beams": 4})))
    with pytest.raises(UserError, match=r"512 new tokens .* maximum is 511"):
        ours.generate_until(requests(("hello", {"max_gen_toks": 512})))


def test_chat_templates_bring_their_own_special_tokens() -> None:
    engine = attach(tiny_model.model(), tokenizer=tiny_model.tokenizer())
    model = EngineLM(engine, decoding(engine, Mode()))
    history = [{"role": "user", "content": "hi"}]
    text = model.apply_chat_template(history)
    assert text == "<|user|>hi<eos><|assistant|>"
    expected = engine.tokenizer.apply_chat_template(
        history, add_generation_prompt=True, return_dict=True
    )
    assert model.tok_encode(text) == expected["input_ids"]
    begun = model.apply_chat_template(
        [*history, {"role": "assistant", "content": "It"}], add_generation_prompt=False
    )
    assert begun == "<|user|>hi<eos><|assistant|>It"


def test_a_text_that_begins_a_text_gets_no_second_beginning() -> None:
    words = tiny_model.tokenizer()
    words.bos_token = "<|system|>"
    engine = attach(tiny_model.model(), tokenizer=words)
    model = EngineLM(engine, decoding(engine, Mode()))
    once = model.tok_encode("<|system|>hi")
    assert once.count(words.bos_token_id) == 1
    assert model.prefix_token_id == words.bos_token_id


def test_dynamic_mode_scores_given_texts_with_all_layers(ours: EngineLM) -> None:
    engine = attach("tiny", "m2r2-carry")
    both = [
        EngineLM(engine, decoding(engine, mode))
        for mode in (Mode(), Mode("dynamic", threshold=0.0))
    ]
    with pytest.warns(UserWarning, match="use all layers"):
        scored = [one.loglikelihood(requests(("Once upon", " a time"))) for one in both]
    assert scored[0] == scored[1]
    with torch.no_grad():
        ids = torch.tensor([engine.tokenizer("Once upon a time")["input_ids"]])
        count = len(engine.tokenizer(" a time", add_special_tokens=False)["input_ids"])
        logits = engine.model(ids).logits[0, -count - 1 : -1].float().log_softmax(-1)
        expected = logits.gather(1, ids[0, -count:, None]).sum()
    assert scored[0][0][0] == pytest.approx(float(expected), rel=0.05)  # bf16


def test_a_chat_template_that_refuses_its_turns_is_said() -> None:
    words = tiny_model.tokenizer()
    words.chat_template = "{{ raise_exception('no') }}"
    engine = attach(tiny_model.model(), tokenizer=words)
    model = EngineLM(engine, decoding(engine, Mode()))
    with pytest.raises(UserError, match=r"^a task's prompt: the model's chat template .* no$"):
        model.apply_chat_template([{"role": "user", "content": "why?"}])
