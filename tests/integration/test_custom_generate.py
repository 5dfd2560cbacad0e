import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
from lab.bench import tiny_model
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)

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
def test_greedy_equals_transformers(
    model: torch.nn.Module, lengths: list[int], options: dict
) -> None:
    inputs = batch(lengths)
    expected = model.generate(**inputs, do_sample=False, **options)
    assert torch.equal(
        model.generate(**inputs, do_sample=False, custom_generate=SPEED, **options), expected
    )


@pytest.mark.parametrize("lengths", [[7], [4, 8, 2]])
def test_eos_list_and_padding_of_rows_that_end_early(
    model: torch.nn.Module, lengths: list[int]
) -> None:
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
    got = model.generate(
        ids, do_sample=False, max_new_tokens=8, custom_generate=SPEED, return_dict_in_generate=True
    )
    assert torch.equal(got.sequences, expected)
    torch.manual_seed(0)
    several = model.generate(
        ids,
        do_sample=True,
        max_new_tokens=8,
        num_return_sequences=3,
        custom_generate=SPEED,
        eos_token_id=None,
    )
    assert several.shape == (3, 14) and len({tuple(row) for row in several.tolist()}) == 3


def test_sampling_settings_reach_the_engine(model: torch.nn.Module) -> None:
    """With one candidate left by top-k, top-p or min-p, sampling is greedy; the seed of torch
    governs the rest.
    """
    inputs = batch([5])
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=10)
    for one in (
        {"top_k": 1},
        {"top_p": 1e-6, "top_k": 0},
        {"min_p": 1.0, "top_k": 0},
        {"temperature": 1e-4},
    ):
        got = model.generate(
            **inputs, do_sample=True, max_new_tokens=10, custom_generate=SPEED, **one
        )
        assert torch.equal(got, expected), one
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(
            model.generate(
                **inputs, do_sample=True, max_new_tokens=20, custom_generate=SPEED
            ).tolist()
        )
    assert draws[0] == draws[1] != draws[2]


def test_sampled_first_tokens_have_the_models_distribution(model: torch.nn.Module) -> None:
    from scipy.stats import chisquare

    inputs = batch([5])
    options = {
        "do_sample": True,
        "temperature": 1.5,
        "top_k": 6,
        "top_p": 0.95,
        "max_new_tokens": 2,
    }
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
    assert (
        chisquare(counts.numpy(), (600 * probs.double() / probs.double().sum()).numpy()).pvalue
        > 1e-4
    )


def test_streamer(model: torch.nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    words = tiny_model.tokenizer()
    inputs = words("once upon", return_tensors="pt")
    printed = []
    for extra in ({}, {"custom_generate": SPEED}):
        streamer = TextStreamer(words, skip_prompt=True)
        model.generate(
            input_ids=inputs["input_ids"],
            do_sample=False,
            max_new_tokens=12,
            streamer=streamer,
            **extra,
        )
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and printed[0].strip()
    with pytest.raises(ValueError):
        model.generate(
            **batch([2, 3]), max_new_tokens=3, streamer=TextStreamer(words), custom_generate=SPEED
        )


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
        custom_generate=custom_generate(
            method="layerskip", backend="hf", speculate="always", tokenizer=words
        ),
    )
    assert torch.equal(got, expected)


def text_that_stops(model: torch.nn.Module, words: object, inputs: dict) -> list[str]:
    """Pieces of greedy text, each of printable characters that no UTF-8 sequence was broken for."""
    text = [
        words.decode([token])
        for token in model.generate(**inputs, do_sample=False, max_new_tokens=30)[0].tolist()
    ]
    return [piece if piece.isascii() and piece.isprintable() else "" for piece in text]


@pytest.mark.parametrize("where", ["generate", "callable"])
def test_stop_strings_as_an_argument_of_generate(model: torch.nn.Module, where: str) -> None:
    words = tiny_model.tokenizer()
    met = 0
    for seed in range(12):
        inputs = batch([6], seed)
        stop = next((piece for piece in text_that_stops(model, words, inputs)[8:] if piece), None)
        if stop is None:
            continue
        options = {
            **inputs,
            "do_sample": False,
            "max_new_tokens": 30,
            "stop_strings": [stop, "never met"],
        }
        expected = model.generate(**options, tokenizer=words)
        if where == "generate":
            got = model.generate(**options, tokenizer=words, custom_generate=SPEED)
        else:
            speed = custom_generate(
                method="layerskip", backend="hf", speculate="always", tokenizer=words
            )
            got = model.generate(**options, custom_generate=speed)
        assert torch.equal(got, expected)
        met += expected.shape[1] < 36
    assert met >= 3


@pytest.mark.parametrize("lengths", [[6], [6, 9, 3]])
def test_a_stop_string_may_begin_in_the_prompt_and_no_other_does(
    model: torch.nn.Module, lengths: list[int]
) -> None:
    words = tiny_model.tokenizer()
    across = 0
    for seed in range(40):
        inputs = batch(lengths, seed)
        width = inputs["input_ids"].shape[1]
        new = model.generate(**inputs, do_sample=False, max_new_tokens=3)[0, width:].tolist()
        inputs["input_ids"][:, -1] = words.convert_tokens_to_ids("q")
        new = model.generate(**inputs, do_sample=False, max_new_tokens=3)[0, width:].tolist()
        piece = words.decode(new[:1])
        if not (piece.isascii() and piece.isprintable()):
            continue
        options = {**inputs, "do_sample": False, "max_new_tokens": 10, "tokenizer": words}
        for stop in ("q" + piece, "q", words.decode(new[:2])):
            expected = model.generate(**options, stop_strings=[stop])
            assert torch.equal(
                model.generate(**options, stop_strings=[stop], custom_generate=SPEED), expected
            )
            across += stop == "q" + piece and (lengths != [6] or expected.shape[1] == width + 1)
    assert across >= 2


def test_stop_strings_in_a_batch_without_an_eos_are_left_to_the_model(
    model: torch.nn.Module,
) -> None:
    words = tiny_model.tokenizer()
    options = {
        **batch([6, 3]),
        "do_sample": False,
        "max_new_tokens": 12,
        "eos_token_id": None,
        "tokenizer": words,
        "stop_strings": ["a"],
        "pad_token_id": 0,
    }
    expected = model.generate(**options)
    with pytest.warns(UserWarning, match="stop strings in a batch without an EOS id"):
        got = model.generate(**options, custom_generate=SPEED)
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
def test_what_we_do_not_do_is_named_and_left_to_the_model(
    model: torch.nn.Module, options: dict, named: str
) -> None:
    inputs = batch([4])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = model.generate(**inputs, do_sample=False, max_new_tokens=10, **options)
    with pytest.warns(UserWarning, match=f"multirate does not speed up this call: .*{named}"):
        got = model.generate(
            **inputs, do_sample=False, max_new_tokens=10, custom_generate=SPEED, **options
        )
    if options.get("return_dict_in_generate"):
        assert torch.equal(got.sequences, expected.sequences) and len(got.scores) == len(
            expected.scores
        )
    else:
        assert torch.equal(got, expected)


def test_right_padding_is_left_to_the_model(model: torch.nn.Module) -> None:
    inputs = batch([4])
    inputs["attention_mask"][0, -1] = 0
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=5)
    with pytest.warns(UserWarning, match="other than left padding"):
        got = model.generate(**inputs, do_sample=False, max_new_tokens=5, custom_generate=SPEED)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("lengths", [[6], [6, 3, 9]])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_generation_beyond_the_context_is_the_models_own(
    lengths: list[int], penalty: float
) -> None:
    short = tiny_model.model(max_position_embeddings=16)
    inputs = batch(lengths)
    options = {
        "do_sample": False,
        "max_new_tokens": 30,
        "eos_token_id": None,
        "repetition_penalty": penalty,
    }
    expected = short.generate(**inputs, **options)
    with pytest.warns(
        UserWarning, match="context of 16 tokens is left to the model's own generate"
    ):
        got = short.generate(**inputs, **options, custom_generate=SPEED)
    assert torch.equal(got, expected)


def test_a_prompt_beyond_the_context_is_left_to_the_model() -> None:
    short = tiny_model.model(max_position_embeddings=16)
    inputs = batch([20, 4])
    expected = short.generate(**inputs, do_sample=False, max_new_tokens=8)
    with pytest.warns(UserWarning, match="a prompt of 20 tokens .*context of 16 tokens"):
        got = short.generate(**inputs, do_sample=False, max_new_tokens=8, custom_generate=SPEED)
    assert torch.equal(got, expected)


def streamed(
    model: torch.nn.Module, inputs: dict, **options: object
) -> tuple[str, BaseException | None]:
    """What a consumer in this thread reads while another one generates, and the error that this
    ended with.
    """
    streamer = TextIteratorStreamer(tiny_model.tokenizer(), timeout=20)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.generate(**inputs, do_sample=False, streamer=streamer, **options)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    text = "".join(streamer)
    thread.join()
    return text, failed[0] if failed else None


@pytest.mark.parametrize("length", [6, 20])
def test_a_streamers_consumer_gets_all_of_a_text_beyond_the_context(length: int) -> None:
    short = tiny_model.model(max_position_embeddings=16)
    inputs = batch([length])
    expected = streamed(short, inputs, max_new_tokens=30, eos_token_id=None)
    assert (
        streamed(short, inputs, max_new_tokens=30, eos_token_id=None, custom_generate=SPEED)
        == expected
    )


class Broken(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise LookupError("broken")


def test_a_streamers_consumer_does_not_wait_for_a_failed_generation(model: torch.nn.Module) -> None:
    broken = LogitsProcessorList([Broken()])
    _, error = streamed(
        model, batch([5]), max_new_tokens=8, custom_generate=SPEED, logits_processor=broken
    )
    assert isinstance(error, LookupError)


def test_a_cache_of_the_callers_is_filled(model: torch.nn.Module) -> None:
    inputs = batch([5])
    ours, own = DynamicCache(config=model.config), DynamicCache(config=model.config)
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=8, past_key_values=own)
    with pytest.warns(UserWarning, match="a (cache|past_key_values) that you have already filled"):
        got = model.generate(
            **inputs, do_sample=False, max_new_tokens=8, past_key_values=ours, custom_generate=SPEED
        )
    assert torch.equal(got, expected)
    assert ours.get_seq_length() == own.get_seq_length() > 5


@pytest.mark.parametrize("lengths", [[5], [5, 3]])
def test_a_negative_eos_is_never_met(model: torch.nn.Module, lengths: list[int]) -> None:
    options = {**batch(lengths), "do_sample": False, "max_new_tokens": 12, "eos_token_id": -1}
    assert torch.equal(model.generate(**options, custom_generate=SPEED), model.generate(**options))


def test_a_row_of_nothing_but_padding_is_left_to_the_model(model: torch.nn.Module) -> None:
    inputs = batch([5, 4])
    inputs["attention_mask"][1] = 0
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=6)
    with pytest.warns(UserWarning, match="only padding"):
        got = model.generate(**inputs, do_sample=False, max_new_tokens=6, custom_generate=SPEED)
    assert torch.equal(got, expected)


def test_the_engine_is_kept_until_the_weights_change() -> None:
    model = tiny_model.model(seed=5)
    inputs = batch([4])

    def run() -> list:
        return model.generate(
            **inputs, do_sample=False, max_new_tokens=6, custom_generate=SPEED
        ).tolist()

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
