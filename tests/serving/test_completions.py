"""/v1/completions, with what lm-evaluation-harness asks of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from multirate.serving.requests import Request
from serving.conftest import CONTEXT, END, WORDS, client, prompt_text, saying, served, tokens
from serving.schedulers import Script, Scripted


def events(text: str) -> list[Any]:
    """The JSON of a stream's events, without the last, which says that it is complete."""
    found = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert found.pop() == "[DONE]"
    return [json.loads(one) for one in found]


def test_a_text_is_continued(echo: Scripted) -> None:
    found = client(echo).complete("hello", max_tokens=3).json()
    assert found["object"] == "text_completion" and found["model"] == "bytes"
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hel", "length")
    assert found["usage"]["prompt_tokens"] == 5 and found["usage"]["completion_tokens"] == 3


def test_sixteen_tokens_are_the_default(echo: Scripted) -> None:
    assert len(client(echo).complete("x" * 50).json()["choices"][0]["text"]) == 16
    assert len(client(echo, max_tokens=7).complete("x" * 50).json()["choices"][0]["text"]) == 7


@pytest.mark.parametrize(
    "prompt", ["ab", [tokens("ab", False)], tokens("ab", False), ["ab", "c"], [[9, 10], [11]]]
)
def test_prompts_are_texts_or_ids_one_or_several(echo: Scripted, prompt: Any) -> None:
    choices = client(echo).complete(prompt, n=2).json()["choices"]
    wanted = {"ab": ["ab"], "c": ["c"]}
    several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    texts = [one if isinstance(one, str) else WORDS.decode(one) for one in several]
    assert [choice["text"] for choice in choices] == [text for text in texts for _ in range(2)]
    assert [choice["index"] for choice in choices] == list(range(2 * len(texts))) and wanted
    assert [request.number for request in echo.requests] == [0, 1] * len(texts)


def test_usage_counts_a_prompt_once_and_drafts_of_all() -> None:
    scheduler = saying("abcdef", sizes=(3,), cached=1)
    found = client(scheduler).complete(["wxyz", "uv"], n=2).json()
    assert found["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 28,
        "total_tokens": 34,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 16,
            "rejected_prediction_tokens": 16,
        },
    }
    timings = found["timings"]
    assert (timings["prompt_n"], timings["cache_n"], timings["predicted_n"]) == (4, 2, 28)
    assert (timings["prompt_ms"], timings["predicted_ms"]) == (500.0, 2000.0)
    assert timings["predicted_per_second"] == 14.0
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (32, 16)


@pytest.mark.parametrize("most", [0, 1])
def test_echo_with_logprobs_of_the_prompt(echo: Scripted, most: int) -> None:
    prompt = tokens("héy", end=False)
    asked = {"echo": True, "logprobs": 1, "max_tokens": most}
    for choice in client(echo).complete([prompt, prompt], **asked).json()["choices"]:
        found = choice["logprobs"]
        assert choice["text"] == "héy" + "h" * most
        assert len(found["tokens"]) == len(found["text_offset"]) == len(prompt) + most
        assert found["token_logprobs"] == [None] + [-0.5] * (len(prompt) - 1 + most)
        assert found["top_logprobs"][0] is None
        for top, chance in zip(found["top_logprobs"][1:], found["token_logprobs"][1:], strict=True):
            assert max(top.values()) == chance
    assert all(request.prompt_logprobs for request in echo.requests)


def test_logprobs_of_new_tokens_only(echo: Scripted) -> None:
    found = client(echo).complete("abc", logprobs=2, max_tokens=2).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "b"] and found["text_offset"] == [0, 1]
    assert found["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
    assert echo.requests[0].logprobs == 2 and not echo.requests[0].prompt_logprobs
    assert client(echo).complete("abc").json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    "more", [{}, {"echo": True}, {"logprobs": 1}, {"echo": True, "logprobs": 1}]
)
@pytest.mark.parametrize("sizes", [(1,), (2, 3)])
def test_a_stream_joins_to_the_whole_answer(more: dict[str, Any], sizes: tuple[int, ...]) -> None:
    def play(request: Request) -> Script:
        return Script([*reversed(request.prompt), END], sizes)

    asked = dict(prompt=["hé STOP", "abc"], n=2, stop=["O", "TS"], **more)
    whole = client(Scripted(play)).complete(**asked).json()
    options = {"include_usage": True}
    stream = client(Scripted(play)).complete(**asked, stream=True, stream_options=options)
    assert stream.headers["content-type"].startswith("text/event-stream")
    chunks = events(stream.text)
    assert chunks.pop()["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    for wanted in whole["choices"]:
        own = [one for c in chunks for one in c["choices"] if one["index"] == wanted["index"]]
        assert "".join(one["text"] for one in own) == wanted["text"]
        assert [one["finish_reason"] for one in own if one["finish_reason"]] == ["stop"]
        parts = [one["logprobs"] for one in own if one["logprobs"]]
        for name, values in (wanted["logprobs"] or {}).items():
            assert [value for part in parts for value in part[name]] == values
    assert sum("timings" in chunk for chunk in chunks) == 4


def test_stop_strings_are_cut_off_and_end_the_decoding() -> None:
    scheduler = saying("one two three")
    whole = client(scheduler).complete(stop="two").json()
    found = whole["choices"][0]
    assert whole["usage"]["completion_tokens"] == 7 and whole["timings"]["predicted_ms"] == 500
    assert (found["text"], found["finish_reason"]) == ("one ", "stop")
    assert not scheduler.tickets[0].cancelled.is_set()
    assert scheduler.requests[0].stop.stop_strings == ("two",)


def test_a_stop_string_that_the_decoder_does_not_see_ends_the_answer_as_well() -> None:
    pad = WORDS.pad_token_id  # no text, but it divides the stop string for the decoder
    ids = [*tokens("one t", False), pad, *tokens("wo three" * 10)]
    scheduler = Scripted(lambda request: Script(ids, seconds=0.001))
    found = client(scheduler).complete(stop=["two"], max_tokens=90).json()
    assert found["choices"][0]["text"] == "one "
    assert found["choices"][0]["finish_reason"] == "stop"
    assert scheduler.tickets[0].cancelled.is_set()
    assert found["usage"]["completion_tokens"] >= 8


def test_the_models_own_stop_strings_hold_as_well() -> None:
    model = served(stop_strings=("three",))
    found = client(saying("one two three"), model).complete().json()["choices"][0]
    assert found["text"] == "one two "


def test_ignore_eos_goes_on() -> None:
    scheduler = saying("abc")
    client(scheduler).complete(ignore_eos=True)
    client(scheduler).complete()
    assert [request.stop.eos_token_ids for request in scheduler.requests] == [(), (END,)]


def test_what_reaches_the_decoder() -> None:
    scheduler = saying("abc")
    client(scheduler).complete(
        "hi",
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.1,
        seed=7,
        max_tokens=4,
        prediction={"type": "content", "content": "maybe this"},
        speculative={"method": "lookup", "n_max": 3},
        user="somebody",
    )
    (request,) = scheduler.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 0)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.seed) == (0.1, 1.1, 7)
    assert request.stop.max_new_tokens == 4 and request.stop.context_limit == CONTEXT
    assert prompt_text(request) == "hi" and list(request.prediction) == tokens("maybe this", False)
    assert request.speculate and request.most_drafted == 3
    client(scheduler).complete(speculative={"method": "none"})
    assert not scheduler.requests[1].speculate


def test_biases_and_penalties_change_the_logits() -> None:
    import torch

    scheduler = saying("abc")
    asked = {"logit_bias": {"7": -100, "8": 2.5}, "frequency_penalty": 0.5, "presence_penalty": 1}
    client(scheduler).complete("hi", **asked)
    (request,) = scheduler.requests
    scores, ids = torch.zeros(1, len(WORDS)), torch.tensor([[*request.prompt, 9, 9, 10]])
    assert request.sampling.processors is not None
    for processor in request.sampling.processors(len(request.prompt)):
        scores = processor(ids, scores)
    found = {place: value for place, value in enumerate(scores[0].tolist()) if value}
    assert found == {7: -100.0, 8: 2.5, 9: -2.0, 10: -1.5}


def test_the_token_that_ends_a_text_is_not_shown_even_if_it_is_a_plain_one() -> None:
    (mark,) = tokens("!", end=False)
    found = client(saying("ab!cd"), served(ends=(mark,))).complete().json()["choices"][0]
    assert (found["text"], found["finish_reason"]) == ("ab", "stop")
