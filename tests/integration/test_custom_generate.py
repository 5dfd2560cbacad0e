import copy
import gc
import warnings
import weakref

import pytest
import torch
from bench import tiny_model
from transformers import LogitsProcessor, LogitsProcessorList, MaxTimeCriteria, StoppingCriteriaList, TextStreamer

from multirate.errors import UserError
from multirate.integration import custom_generate
from multirate.integration.engines import _ATTRIBUTE

SPEED = custom_generate(method="layerskip", backend="hf", speculate="always")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model.model()


@pytest.fixture(autouse=True)
def no_fallback_unnoticed():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="multirate does not speed up")
        yield


def batch(lengths: list[int], seed: int = 1) -> dict[str, torch.Tensor]:
    """Left-padded random prompts."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(5, 261, (len(lengths), width), generator=generator)
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def rare_eos(model: torch.nn.Module, inputs: dict, steps: int = 6) -> int:
    """A token that greedy text reaches after a few steps, to serve as an EOS."""
    return int(model.generate(**inputs, do_sample=False, max_new_tokens=steps + 1)[0, -1])


@pytest.mark.parametrize("lengths", [[7], [3, 9, 1], [5, 5, 5, 5]])
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 20},
        {"max_new_tokens": 1},
        {"max_length": 15},
        {"max_new_tokens": 16, "repetition_penalty": 1.3},
        {"max_new_tokens": 12, "temperature": 0.7, "top_k": 5},  # of no effect without sampling
    ],
)
def test_greedy_equals_transformers(model: torch.nn.Module, lengths: list[int], options: dict) -> None:
    inputs = batch(lengths)
    expected = model.generate(**inputs, do_sample=False, **options)
    assert torch.equal(model.generate(**inputs, do_sample=False, custom_generate=SPEED, **options), expected)


@pytest.mark.parametrize("lengths", [[7], [4, 8, 2]])
def test_eos_list_and_padding_of_rows_that_end_early(model: torch.nn.Module, lengths: list[int]) -> None:
    inputs = batch(lengths)
    ends = [3, rare_eos(model, inputs)]
    options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": ends, "pad_token_id": 2}
    expected = model.generate(**inputs, **options)
    got = model.generate(**inputs, **options, custom_generate=SPEED)
    assert torch.equal(got, expected)
    assert (expected[0, max(lengths) :] == ends[1]).any()  # the EOS was in fact met


def test_no_attention_mask_dict_output_and_return_sequences(model: torch.nn.Module) -> None:
    ids = batch([6])["input_ids"]
    expected = model.generate(ids, do_sample=False, max_new_tokens=8)
    got = model.generate(ids, do_sample=False, max_new_tokens=8, custom_generate=SPEED, return_dict_in_generate=True)
    assert torch.equal(got.sequences, expected)
    torch.manual_seed(0)
    several = model.generate(
        ids, do_sample=True, max_new_tokens=8, num_return_sequences=3, custom_generate=SPEED, eos_token_id=None
    )
    assert several.shape == (3, 14) and len({tuple(row) for row in several.tolist()}) == 3


def test_sampling_settings_reach_the_engine(model: torch.nn.Module) -> None:
    """With one candidate left by top-k, top-p or min-p, sampling is greedy; the seed of torch governs the rest."""
    inputs = batch([5])
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=10)
    for one in ({"top_k": 1}, {"top_p": 1e-6, "top_k": 0}, {"min_p": 1.0, "top_k": 0}, {"temperature": 1e-4}):
        got = model.generate(**inputs, do_sample=True, max_new_tokens=10, custom_generate=SPEED, **one)
        assert torch.equal(got, expected), one
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(model.generate(**inputs, do_sample=True, max_new_tokens=20, custom_generate=SPEED).tolist())
    assert draws[0] == draws[1] != draws[2]


def test_sampled_first_tokens_have_the_models_distribution(model: torch.nn.Module) -> None:
    from scipy.stats import chisquare

    inputs = batch([5])
    options = {"do_sample": True, "temperature": 1.5, "top_k": 6, "top_p": 0.95, "max_new_tokens": 2}
    torch.manual_seed(0)
    wide = {name: value.expand(600, -1) for name, value in inputs.items()}
    got = model.generate(**wide, **options, custom_generate=SPEED)[:, 5]
    with torch.no_grad():
        logits = model(**inputs).logits[0, -1] / 1.5
    kept = logits.topk(6)
    probs = kept.values.softmax(0)
    keep = probs.cumsum(0) - probs < 0.95
    probs = probs[keep] / probs[keep].sum()
    counts = torch.tensor([(got == token).sum() for token in kept.indices[keep]])
    assert int(counts.sum()) == 600
    assert chisquare(counts.numpy(), (600 * probs.double() / probs.double().sum()).numpy()).pvalue > 1e-4


def test_streamer(model: torch.nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    words = tiny_model.tokenizer()
    inputs = words("once upon", return_tensors="pt")
    printed = []
    for extra in ({}, {"custom_generate": SPEED}):
        streamer = TextStreamer(words, skip_prompt=True)
        model.generate(
            input_ids=inputs["input_ids"], do_sample=False, max_new_tokens=12, streamer=streamer, **extra
        )
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and printed[0].strip()
    with pytest.raises((UserError, ValueError)):
        model.generate(**batch([2, 3]), max_new_tokens=3, streamer=TextStreamer(words), custom_generate=SPEED)


def test_stop_strings(model: torch.nn.Module) -> None:
    from transformers import StopStringCriteria

    words = tiny_model.tokenizer()
    options = {"do_sample": False, "max_new_tokens": 30}
    for seed in range(20):  # until the random text has a letter to stop at
        inputs = batch([6], seed)
        letters = [words.decode([t]) for t in model.generate(**inputs, **options)[0, 9:30]]
        stop = next((letter for letter in letters if letter.isascii() and letter.isprintable()), "")
        if len(stop) == 1:
            break
    expected = model.generate(**inputs, **options, stop_strings=[stop], tokenizer=words)
    assert expected.shape[1] < 36
    got = model.generate(
        **inputs,
        **options,
        stopping_criteria=StoppingCriteriaList([StopStringCriteria(words, [stop])]),
        custom_generate=custom_generate(method="layerskip", backend="hf", speculate="always", tokenizer=words),
    )
    assert torch.equal(got, expected)


class Forbid(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, ::2] = -float("inf")
        return scores


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"logits_processor": LogitsProcessorList([Forbid()])}, "Forbid"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
        ({"bad_words_ids": [[7]]}, "NoBadWordsLogitsProcessor"),
        ({"min_new_tokens": 9}, "Min.*LengthLogitsProcessor"),
        ({"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(100.0)])}, "MaxTimeCriteria"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    ],
)
def test_what_we_do_not_do_is_named_and_left_to_the_model(model: torch.nn.Module, options: dict, named: str) -> None:
    inputs = batch([4])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = model.generate(**inputs, do_sample=False, max_new_tokens=10, **options)
    with pytest.warns(UserWarning, match=f"multirate does not speed up this call: .*{named}"):
        got = model.generate(**inputs, do_sample=False, max_new_tokens=10, custom_generate=SPEED, **options)
    if options.get("return_dict_in_generate"):
        assert torch.equal(got.sequences, expected.sequences) and len(got.scores) == len(expected.scores)
    else:
        assert torch.equal(got, expected)


def test_right_padding_is_left_to_the_model(model: torch.nn.Module) -> None:
    inputs = batch([4])
    inputs["attention_mask"][0, -1] = 0
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=5)
    with pytest.warns(UserWarning, match="other than left padding"):
        got = model.generate(**inputs, do_sample=False, max_new_tokens=5, custom_generate=SPEED)
    assert torch.equal(got, expected)


def test_the_context_limit_is_said() -> None:
    short = tiny_model.model(max_position_embeddings=16)
    inputs = batch([6])
    expected = short.generate(**inputs, do_sample=False, max_new_tokens=10, eos_token_id=None)
    with pytest.warns(UserWarning, match="context limit"):
        got = short.generate(**inputs, do_sample=False, max_new_tokens=30, custom_generate=SPEED, eos_token_id=None)
    assert torch.equal(got, expected)


def test_the_engine_is_kept_until_the_weights_change() -> None:
    model = tiny_model.model(seed=5)
    inputs = batch([4])

    def run() -> list:
        return model.generate(**inputs, do_sample=False, max_new_tokens=6, custom_generate=SPEED).tolist()

    run()
    first = list(model.__dict__[_ATTRIBUTE].engines.values())
    run()
    assert list(model.__dict__[_ATTRIBUTE].engines.values()) == first
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    assert run() == model.generate(**inputs, do_sample=False, max_new_tokens=6).tolist()
    again = list(model.__dict__[_ATTRIBUTE].engines.values())
    assert len(again) == 1 and again != first  # the engine of the old weights is dropped
    assert not copy.deepcopy(model).__dict__[_ATTRIBUTE].engines
    assert not any(_ATTRIBUTE in name for name in model.state_dict())


def test_the_model_can_be_freed() -> None:
    model = tiny_model.model(seed=6)
    model.generate(**batch([4]), max_new_tokens=3, custom_generate=SPEED)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
