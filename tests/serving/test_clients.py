"""OpenAI's own client, with scripted answers and with a real model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

import multirate
from multirate.serving.model import ServedModel
from multirate.serving.scheduler import start
from multirate.serving.settings import ServingSettings
from serving.conftest import Running, running, saying
from serving.test_chat import CALL, TOOL

HI: list[Any] = [{"role": "user", "content": "hi"}]


def connect(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def scripted() -> Iterator[openai.OpenAI]:
    with running(saying(f"<think>t</think>See: {CALL}", sizes=(3,))) as server:
        yield connect(server)


@pytest.fixture(scope="module")
def engine() -> Any:
    return multirate.attach("tiny")


@pytest.fixture(scope="module")
def real() -> Iterator[Running]:
    """With an engine of its own, as the decoding thread keeps it to itself."""
    engine, settings = multirate.attach("tiny"), ServingSettings(parallel=4)
    scheduler = start(engine, settings)
    with running(scheduler, ServedModel.of(engine, "tiny", settings)) as server:
        yield server


def test_models(scripted: openai.OpenAI) -> None:
    assert [model.id for model in scripted.models.list()] == ["bytes"]
    assert scripted.models.retrieve("bytes").owned_by == "multirate"


def test_tools(scripted: openai.OpenAI) -> None:
    tools: Any = [TOOL]
    found = scripted.chat.completions.create(model="bytes", messages=HI, tools=tools)
    told = found.choices[0].message
    assert told.content == "See: " and told.reasoning_content == "t"  # type: ignore[attr-defined]
    assert told.tool_calls is not None and found.choices[0].finish_reason == "tool_calls"
    assert json.loads(told.tool_calls[0].function.arguments) == {"town": "Ulm"}  # type: ignore[union-attr]
    with scripted.chat.completions.stream(model="bytes", messages=HI, tools=tools) as stream:
        for _ in stream:
            pass
        last = stream.get_final_completion().choices[0].message
    assert last.content == "See: " and last.tool_calls is not None
    assert last.tool_calls[0].function.name == "weather"


def test_responses(scripted: openai.OpenAI) -> None:
    found = scripted.responses.create(model="bytes", input="hi")
    assert found.output_text == f"See: {CALL}"
    flat: Any = TOOL["function"] | {"type": "function"}  # type: ignore[operator]
    with scripted.responses.stream(model="bytes", input="hi", tools=[flat]) as stream:
        kinds = {event.type for event in stream}
        last = stream.get_final_response()
    assert last.output_text == "See: " and last.output[-1].type == "function_call"
    assert {"response.output_text.delta", "response.function_call_arguments.done"} <= kinds


def test_errors_are_the_clients_own_kinds(scripted: openai.OpenAI) -> None:
    ask = scripted.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        ask(model="gpt-4", messages=HI)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(model="bytes", messages=HI, temperature=-1)
    with running(saying("x"), api_key="key") as server, pytest.raises(openai.AuthenticationError):
        connect(server).models.list()
    busy = saying("x")
    busy.room = 0
    with running(busy) as server, pytest.raises(openai.RateLimitError) as full:
        connect(server).completions.create(model="bytes", prompt="x")
    assert full.value.response.headers["retry-after"] == "2"
    failing = saying("xy", error=KeyError("x"))
    with running(failing) as server, pytest.raises(openai.APIError, match="its log"):
        list(connect(server).completions.create(model="bytes", prompt="x", stream=True))


def test_a_real_models_text_is_the_engines_own(real: Running, engine: Any) -> None:
    ids = engine.tokenizer("The capital of France is")["input_ids"]
    own = engine.generate([ids], stop=engine.stopping(12), speculate="never").sequences[0]
    wanted = engine.tokenizer.decode(own, skip_special_tokens=True)
    ask = connect(real).completions.create
    prompts: list[Any] = ["The capital of France is", ids]
    for prompt in prompts:
        found = ask(model="tiny", prompt=prompt, max_tokens=12)
        assert found.choices[0].text == wanted
        stream = ask(model="tiny", prompt=prompt, max_tokens=12, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == wanted


def test_a_prompt_is_scored_as_lm_evaluation_harness_does(real: Running, engine: Any) -> None:
    """Token ids in, `echo`, `logprobs` and one new token; the continuation's part is summed up."""
    ask = connect(real).completions.create
    ids = engine.tokenizer("The capital of France is")["input_ids"]
    written = ask(model="tiny", prompt=ids, max_tokens=8, temperature=0, logprobs=1, seed=1)
    chances = written.choices[0].logprobs
    assert chances is not None and chances.token_logprobs is not None
    own = engine.generate([ids], stop=engine.stopping(8), speculate="never").sequences[0]
    prompts = [[*ids, *own], [*ids, *reversed(own)]]
    scored = ask(model="tiny", prompt=prompts, max_tokens=1, echo=True, logprobs=1, temperature=0)
    greedy = []
    for choice, prompt in zip(scored.choices, prompts, strict=True):
        found = choice.logprobs
        assert found is not None and found.token_logprobs is not None
        assert found.top_logprobs is not None and len(found.token_logprobs) == len(prompt) + 1
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        part = slice(len(ids), -1)
        tops = [max(top.values()) for top in found.top_logprobs[part]]
        greedy.append(found.token_logprobs[part] == tops)
    assert greedy == [True, False]
    again = scored.choices[0].logprobs
    assert again is not None and again.token_logprobs is not None
    assert again.token_logprobs[len(ids) : -1] == pytest.approx(chances.token_logprobs, abs=1e-4)


def test_many_at_a_time_with_the_async_client(real: Running) -> None:
    async def ask() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key="any") as client:

            async def one(number: int) -> tuple[str, str]:
                asked: Any = dict(
                    model="tiny",
                    messages=[{"role": "user", "content": f"Number {number}"}],
                    max_tokens=8,
                    seed=number,
                    temperature=0.8,
                )
                whole = await client.chat.completions.create(**asked)
                pieces = []
                async for chunk in await client.chat.completions.create(**asked, stream=True):
                    pieces += [choice.delta.content or "" for choice in chunk.choices]
                return whole.choices[0].message.content or "", "".join(pieces)

            return await asyncio.gather(*(one(number) for number in range(6)))

    found = asyncio.run(ask())
    assert all(whole == pieces for whole, pieces in found)
    assert len({whole for whole, _ in found}) > 1


class Town(BaseModel):
    name: str
    large: bool


def test_structured_output_with_drafts(real: Running) -> None:
    """A tiny model writes nonsense, but nonsense of the right form."""
    client = connect(real)
    written: list[list[str | None]] = []
    for extra in ({}, {"speculative": {"method": "none"}}):
        loose = {"guided_regex": "[a-z, ]{40,60}[.]"} | extra
        told = client.chat.completions.create(model="tiny", messages=HI, extra_body=loose)
        written.append([told.choices[0].message.content])
        choice = {"structured_outputs": {"choice": ["yes", "no"]}}
        told = client.chat.completions.create(model="tiny", messages=HI, extra_body=choice | extra)
        assert told.choices[0].message.content in ("yes", "no")
        regex = {"guided_regex": r"[a-c]{3}-\d\d"}
        told = client.chat.completions.create(model="tiny", messages=HI, extra_body=regex | extra)
        text = told.choices[0].message.content
        written[-1].append(text)
        assert text is not None and len(text) == 6 and text[3] == "-" and text[4:].isdigit()
    assert written[0] == written[1]
    tools: Any = [TOOL]
    forced = client.chat.completions.create(
        model="tiny", messages=HI, tools=tools, tool_choice="required", max_tokens=60
    )
    if forced.choices[0].finish_reason == "tool_calls":
        calls = forced.choices[0].message.tool_calls
        assert calls is not None and calls[0].function.name == "weather"  # type: ignore[union-attr]
    schema = {"type": "object", "properties": {"large": {"type": "boolean"}}, "required": ["large"]}
    closed: Any = {
        "type": "json_schema",
        "json_schema": {"name": "t", "schema": schema | {"additionalProperties": False}},
    }
    told = client.chat.completions.create(model="tiny", messages=HI, response_format=closed)
    assert isinstance(json.loads(told.choices[0].message.content or "")["large"], bool)


def test_a_parsed_answer() -> None:
    with running(saying('{"name": "Ulm", "large": false}')) as server:
        found = connect(server).chat.completions.parse(
            model="bytes", messages=HI, response_format=Town
        )
        assert found.choices[0].message.parsed == Town(name="Ulm", large=False)
        answer = connect(server).responses.parse(model="bytes", input="hi", text_format=Town)
        assert answer.output_parsed == Town(name="Ulm", large=False)
