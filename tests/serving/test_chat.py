"""/v1/chat/completions and /v1/responses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from multirate.serving.requests import Request
from serving.conftest import WORDS, client, prompt_text, saying, served, tokens
from serving.schedulers import Script, Scripted
from serving.test_completions import events

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Ulm"}}\n</tool_call>'


def message(found: Any) -> Any:
    return found.json()["choices"][0]["message"]


def test_turns_go_through_the_chat_template() -> None:
    scheduler = saying("Hello!")
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    ]
    found = client(scheduler).chat(messages=turns)
    assert message(found) == {"role": "assistant", "content": "Hello!", "refusal": None}
    assert found.json()["choices"][0]["finish_reason"] == "stop"
    wanted = "<|system|>Be brief.<eos><|user|>hi<eos><|assistant|>"
    assert prompt_text(scheduler.requests[0]) == wanted
    assert scheduler.requests[0].stop.max_new_tokens is None


def test_max_completion_tokens_comes_before_max_tokens() -> None:
    found = client(saying("abcdef")).chat(max_tokens=4, max_completion_tokens=2).json()
    assert found["choices"][0]["message"]["content"] == "ab"
    assert found["choices"][0]["finish_reason"] == "length"
    assert len(message(client(saying("abcdef"), max_tokens=3).chat())["content"]) == 3


def test_logprobs_have_bytes_and_alternatives() -> None:
    found = client(saying("hé")).chat(logprobs=True, top_logprobs=2).json()
    first, second, third, end = found["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("h", [104], -0.5)
    assert [one["logprob"] for one in first["top_logprobs"]] == [-0.5, -1.5]
    assert second["bytes"] + third["bytes"] == list("é".encode()) and end["token"] == "<eos>"
    plain = client(saying("hé")).chat(logprobs=True).json()
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize("sizes", [(1,), (4, 1)])
def test_a_stream_joins_to_the_whole_answer(sizes: tuple[int, ...]) -> None:
    text = f"<think>Well</think>\n\nLet me see. {CALL}\n{CALL}"
    asked = dict(tools=[TOOL], n=2, logprobs=True, stream_options={"include_usage": True})
    whole = client(saying(text, sizes=sizes)).chat(**asked).json()
    chunks = events(client(saying(text, sizes=sizes)).chat(**asked, stream=True).text)
    assert chunks.pop()["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    for wanted in whole["choices"]:
        own = [one for c in chunks for one in c["choices"] if one["index"] == wanted["index"]]
        deltas = [one["delta"] for one in own]
        assert deltas[0] == {"role": "assistant", "content": ""}
        told = wanted["message"]
        assert "".join(one.get("content", "") for one in deltas) == told["content"]
        thought = "".join(one.get("reasoning_content", "") for one in deltas)
        assert thought == told["reasoning_content"] == "Well"
        calls = [call for one in deltas for call in one.get("tool_calls", [])]
        assert [call["index"] for call in calls] == [0, 1]
        assert [call["function"] for call in calls] == [
            one["function"] for one in told["tool_calls"]
        ]
        chances = [one["logprobs"]["content"] for one in own if one["logprobs"]]
        assert [one for some in chances for one in some] == wanted["logprobs"]["content"]
        assert own[-1]["finish_reason"] == wanted["finish_reason"] == "tool_calls"


def test_a_call_is_told_from_text() -> None:
    found = client(saying(CALL)).chat(tools=[TOOL])
    told = message(found)
    assert told["content"] is None
    assert told["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"town": "Ulm"}'}
    assert told["tool_calls"][0]["id"].startswith("call_")
    assert message(client(saying(CALL)).chat())["content"] == CALL
    assert message(client(saying(CALL)).chat(tools=[TOOL], tool_choice="none"))["content"] == CALL


def test_tools_are_shown_to_the_model_with_and_without_a_place_in_its_template() -> None:
    scheduler = saying("ok")
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    client(scheduler).chat(messages=turns, tools=[TOOL])
    shown = prompt_text(scheduler.requests[0])
    assert shown.startswith("<|system|>Be brief.\n\nYou may call") and '"town"' in shown
    words = type(WORDS)(tokenizer_object=WORDS.backend_tokenizer, eos_token="<eos>")
    words.chat_template = "{% for t in tools %}[{{ t.function.name }}]{% endfor %}" + (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "({{ c.function.arguments.town }}){% endfor %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    call["function"] = {"name": "weather", "arguments": '{"town": "Ulm"}'}
    turns = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
    ]
    client(scheduler, served(tokenizer=words)).chat(messages=turns, tools=[TOOL])
    assert prompt_text(scheduler.requests[1]) == "[weather]A(Ulm)sun"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_forced_call_has_a_grammar(choice: Any) -> None:
    import torch

    scheduler = saying(CALL)
    told = message(client(scheduler).chat(tools=[TOOL], tool_choice=choice))
    assert told["tool_calls"][0]["function"]["name"] == "weather"
    (request,) = scheduler.requests
    assert request.sampling.processors is not None
    (processor,) = request.sampling.processors(len(request.prompt))
    scores = processor(torch.tensor([list(request.prompt)]), torch.zeros(1, len(WORDS)))
    admitted = (scores[0] > -torch.inf).nonzero().flatten().tolist()
    assert admitted == tokens("<", end=False)


@pytest.mark.parametrize(
    ("asked", "first"),
    [
        ({"response_format": {"type": "json_object"}}, "{"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "array"}, "strict": True},
                }
            },
            "[",
        ),
        ({"guided_regex": "(x|y)z"}, "xy"),
        ({"guided_json": {"const": 7}}, "7"),
        ({"guided_choice": ["a", "b"]}, "ab"),
        ({"guided_grammar": 'start: "q"'}, "q"),
        ({"structured_outputs": {"regex": "(x|y)z"}}, "xy"),
        ({"structured_outputs": {"json": '{"const": 7}'}}, "7"),
        ({"structured_outputs": {"choice": ["a"]}}, "a"),
        ({"structured_outputs": {"grammar": 'start: "q"'}}, "q"),
        ({"response_format": {"type": "text"}}, None),
    ],
)
def test_the_form_of_an_answer(asked: dict[str, Any], first: str | None) -> None:
    import torch

    scheduler = saying("x")
    assert client(scheduler).chat(n=2, **asked).status_code == 200
    made = [request.sampling.processors for request in scheduler.requests]
    if first is None:
        assert made == [None, None]
        return
    for request, processors in zip(scheduler.requests, made, strict=True):
        assert processors is not None
        (processor,) = processors(len(request.prompt))
        scores = processor(torch.tensor([list(request.prompt)]), torch.zeros(1, len(WORDS)))
        admitted = (scores[0] > -torch.inf).nonzero().flatten().tolist()
        assert WORDS.decode(sorted(admitted)) == first
    assert made[0](1)[0] is not made[1](1)[0]  # type: ignore[misc]


def test_template_variables_may_be_given() -> None:
    words = type(WORDS)(tokenizer_object=WORDS.backend_tokenizer, eos_token="<eos>")
    words.chat_template = "{{ messages[0].content }}{% if thinks %}<think>\n{% endif %}"
    scheduler = saying("why</think>so")
    asked = client(scheduler, served(tokenizer=words)).chat
    told = message(asked(chat_template_kwargs={"thinks": True}))
    assert (told["reasoning_content"], told["content"]) == ("why", "so")
    assert message(asked())["content"] == "why</think>so"


def test_tags_may_be_special_tokens() -> None:
    words = type(WORDS)(tokenizer_object=WORDS.backend_tokenizer, eos_token="<eos>")
    words.chat_template = WORDS.chat_template
    words.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    ids = words(CALL)["input_ids"]
    assert len(ids) < len(tokens(CALL)) and words.decode(ids, skip_special_tokens=True) != CALL
    model = served(tokenizer=words, vocabulary=len(words))
    found = client(Scripted(lambda request: Script(ids)), model).chat(tools=[TOOL])
    assert message(found)["tool_calls"][0]["function"]["name"] == "weather"


def responses(scheduler: Any, **body: Any) -> Any:
    return client(scheduler)("POST", "/v1/responses", json={"input": "hi"} | body)


def test_responses_take_items_and_tools() -> None:
    scheduler = saying(f"<think>t</think>ok {CALL}")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "A"}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "sun"},
        {"type": "reasoning", "summary": []},
    ]
    flat = TOOL["function"] | {"type": "function"}  # type: ignore[operator]
    found = responses(scheduler, input=items, instructions="Be brief.", tools=[flat]).json()
    kinds = [item["type"] for item in found["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
    assert found["output"][0]["content"][0]["text"] == "t"
    assert found["output"][1]["content"][0]["text"] == "ok "
    assert found["output"][2]["arguments"] == '{"town": "Ulm"}'
    shown = prompt_text(scheduler.requests[0])
    assert shown.startswith("<|system|>Be brief.\n\nYou may")
    assert shown.endswith("<|user|>A<eos><|assistant|><eos><|tool|>sun<eos><|assistant|>")


def test_a_response_that_was_cut_off_says_so() -> None:
    found = responses(saying("abcdef"), max_output_tokens=3).json()
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["usage"]["output_tokens"] == 3 and found["timings"]["predicted_n"] == 3


@pytest.mark.parametrize("text", ["hello", f"<think>t</think>ok {CALL}\n{CALL}", "", CALL])
def test_a_stream_of_response_events_joins_to_the_whole(text: str) -> None:
    flat = TOOL["function"] | {"type": "function"}  # type: ignore[operator]
    whole = responses(saying(text), tools=[flat]).json()
    lines = responses(saying(text), tools=[flat], stream=True).text.splitlines()
    found = [json.loads(line.removeprefix("data: ")) for line in lines if line[:5] == "data:"]
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    named = [line.removeprefix("event: ") for line in lines if line.startswith("event:")]
    assert named == [one["type"] for one in found]
    last = found[-1]
    assert last["type"] == "response.completed"

    def bare(items: Any) -> Any:
        return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]

    assert bare(last["response"]["output"]) == bare(whole["output"])
    deltas = [one["delta"] for one in found if one["type"] == "response.output_text.delta"]
    told = [i["content"][0]["text"] for i in whole["output"] if i["type"] == "message"]
    assert "".join(deltas) == "".join(told)


def test_one_seed_gives_each_answer_its_own_number() -> None:
    scheduler = Scripted(lambda request: Script(tokens(str(request.number))))
    found = client(scheduler).chat(n=3, seed=5, temperature=1).json()
    assert [one["message"]["content"] for one in found["choices"]] == ["0", "1", "2"]
    requests: list[Request] = scheduler.requests
    assert {request.sampling.seed for request in requests} == {5}
