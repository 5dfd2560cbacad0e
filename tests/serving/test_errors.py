"""What a client did wrong: OpenAI's shape, the right status, and no prompt in the log."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multirate.errors import UserError
from multirate.serving import logs
from multirate.serving.bodies import ChatBody, CompletionBody, ResponsesBody
from multirate.serving.requests import Stopping
from serving.conftest import CONTEXT, client, saying, served
from serving.schedulers import Script, Scripted
from serving.test_chat import TOOL

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}


def refused(found: httpx.Response, status: int, param: str | None, *parts: str) -> Any:
    """An error in OpenAI's shape."""
    assert found.status_code == status, found.text
    assert set(found.json()) == {"error"}
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    for part in parts:
        assert part in error["message"], error
    assert found.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"hello", "no JSON"),
        (b'{"prompt": "\xff"}', "no JSON"),
        (b'{"prompt": "\\ud800"}', "no JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "no JSON"),
        (b'{"prompt": "a", "metadata": {"x": NaN}}', "no JSON"),
        (b'{"prompt": "a", "top_p": Infinity}', "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "the body"),
        (b"7", "the body"),
        (b"null", "the body"),
    ],
)
def test_bodies_that_are_no_object(data: bytes, part: str) -> None:
    kind = {"content-type": "application/json"}
    found = client(saying("x"))("POST", "/v1/completions", content=data, headers=kind)
    refused(found, 400, found.json()["error"]["param"], part)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {}, "prompt"),
        ("completions", {"prompt": 7}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": [[]]}, "prompt"),
        ("completions", {"prompt": [1.5]}, "prompt"),
        ("completions", {"prompt": [True]}, "prompt"),
        ("completions", {"prompt": [[1], 2]}, "prompt"),
        ("completions", {"prompt": [10**30]}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt"),
        ("completions", {"prompt": [100_000]}, "prompt"),
        ("completions", {"prompt": "x" * (CONTEXT + 1)}, "prompt"),
        ("completions", TEXT | {"max_tokens": -1}, "max_tokens"),
        ("completions", TEXT | {"max_tokens": 1.5}, "max_tokens"),
        ("completions", TEXT | {"max_tokens": 101}, "max_tokens"),
        ("completions", TEXT | {"n": 0}, "n"),
        ("completions", TEXT | {"n": 65}, "n"),
        ("completions", {"prompt": ["a"] * 13, "n": 5}, "n"),
        ("completions", TEXT | {"n": 10**30}, "n"),
        ("completions", TEXT | {"temperature": -1}, "temperature"),
        ("completions", TEXT | {"temperature": "1"}, "temperature"),
        ("completions", TEXT | {"temperature": True}, "temperature"),
        ("completions", TEXT | {"stream": "yes"}, "stream"),
        ("completions", TEXT | {"stream_options": {"include_usage": 1}}, "stream_options"),
        ("completions", TEXT | {"stop": ["x"] * 65}, "stop"),
        ("completions", TEXT | {"stop": "x" * 1025}, "stop"),
        ("completions", TEXT | {"stop": [""]}, "stop"),
        ("completions", TEXT | {"stop": [7]}, "stop"),
        ("completions", TEXT | {"logprobs": 21}, "logprobs"),
        ("completions", TEXT | {"logprobs": -1}, "logprobs"),
        ("completions", TEXT | {"best_of": 2}, "best_of"),
        ("completions", TEXT | {"suffix": "end"}, "suffix"),
        ("completions", TEXT | {"frequency_penalty": 3}, "frequency_penalty"),
        ("completions", TEXT | {"logit_bias": {"x": 1}}, "logit_bias"),
        ("completions", TEXT | {"logit_bias": {"5": 101}}, "logit_bias"),
        ("completions", TEXT | {"logit_bias": {"99999": 1}}, "logit_bias"),
        ("completions", TEXT | {"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ("completions", TEXT | {"logit_bias": [1]}, "logit_bias"),
        ("completions", TEXT | {"speculative": {"method": "eager"}}, "speculative"),
        ("completions", TEXT | {"speculative": {"n_max": -1}}, "speculative"),
        ("completions", TEXT | {"prediction": {"type": "other", "content": ""}}, "prediction"),
        ("completions", TEXT | {"guided_choice": []}, "guided_choice"),
        ("completions", TEXT | {"structured_outputs": {"other": 1}}, "structured_outputs"),
        ("chat/completions", {}, "messages"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": "hi"}, "messages"),
        ("chat/completions", {"messages": [{"role": "king", "content": "hi"}]}, "messages"),
        ("chat/completions", {"messages": [{"content": "hi"}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": 7}]}, "messages"),
        ("chat/completions", CHAT | {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", CHAT | {"max_completion_tokens": 101}, "max_completion_tokens"),
        ("chat/completions", CHAT | {"tool_choice": "required"}, "tool_choice"),
        ("chat/completions", CHAT | {"tool_choice": "sometimes"}, "tool_choice"),
        ("chat/completions", CHAT | {"tools": [{"type": "function"}]}, "tools"),
        ("chat/completions", CHAT | {"response_format": {"type": "xml"}}, "response_format"),
        (
            "chat/completions",
            CHAT | {"response_format": {"type": "json_schema"}},
            "response_format",
        ),
        (
            "chat/completions",
            CHAT | {"chat_template_kwargs": {"tokenize": 1}},
            "chat_template_kwargs",
        ),
        ("chat/completions", CHAT | {"chat_template_kwargs": {"where": 1}}, "chat_template_kwargs"),
        ("responses", {}, "input"),
        ("responses", {"input": "hi", "previous_response_id": "r"}, "previous_response_id"),
        ("responses", {"input": "hi", "background": True}, "background"),
        ("responses", {"input": [{"type": "computer_call"}]}, "input"),
        ("responses", {"input": [{"role": "king", "content": "hi"}]}, "messages"),
        ("responses", {"input": "hi", "max_output_tokens": 101}, "max_completion_tokens"),
    ],
)
def test_fields_that_cannot_be_used_are_named(path: str, body: Any, param: str) -> None:
    scheduler = saying("x")
    found = client(scheduler, max_tokens=100)("POST", f"/v1/{path}", json=body)
    error = refused(found, 400, param)
    assert error["type"] == "invalid_request_error"
    assert not scheduler.requests


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ({"guided_regex": "["}, ("guided_regex", "unclosed")),
        ({"guided_regex": r"[^\s\S]"}, ("guided_regex", "no text at all")),
        ({"guided_json": "{"}, ("guided_json",)),
        ({"guided_grammar": "start: x"}, ("guided_grammar",)),
        ({"guided_json": {"enum": []}}, ("guided_json",)),
        ({"guided_regex": "a", "guided_choice": ["b"]}, ("exclude each other",)),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            ("response_format and structured_outputs.regex exclude each other",),
        ),
        ({"tools": [TOOL], "tool_choice": named("other")}, ("'other'", "weather")),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, ("exclude",)),
        ({"top_p": 0}, ("top_p is 0",)),
        ({"top_k": -2}, ("top_k is -2",)),
        ({"seed": -1}, ("seed is -1",)),
        ({"min_p": 2}, ("min_p is 2",)),
        ({"repetition_penalty": 0}, ("repetition_penalty is 0",)),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ("image_url",)),
        ({"prediction": {"type": "content", "content": [{"type": "audio"}]}}, ("audio",)),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}]},
            ("messages.0 has a tool call without",),
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                    }
                ]
            },
            ("whose arguments are no JSON",),
        ),
    ],
)
def test_values_that_cannot_be_used_are_explained(body: Any, parts: tuple[str, ...]) -> None:
    scheduler = saying("x")
    found = client(scheduler).chat(**body)
    assert found.status_code == 400 and not scheduler.requests
    for part in parts:
        assert part in found.json()["error"]["message"]


def test_turns_that_the_template_refuses() -> None:
    words = type(served().tokenizer)(tokenizer_object=served().tokenizer.backend_tokenizer)
    words.chat_template = "{{ raise_exception('roles must alternate') }}"
    found = client(saying("x"), served(tokenizer=words)).chat()
    refused(found, 400, "messages", "roles must alternate")


def test_another_model_is_not_found() -> None:
    ask = client(saying("x"), served(aliases=frozenset({"./bytes.gguf"})))
    error = refused(ask.complete(model="gpt-4"), 404, "model", "'gpt-4'", "bytes")
    assert error["code"] == "model_not_found"
    refused(ask("GET", "/v1/models/gpt-4"), 404, "model")
    assert ask("GET", "/v1/models/bytes").json()["id"] == "bytes"
    for name in ("bytes", "./bytes.gguf", None):
        assert ask.complete(model=name).json()["model"] == "bytes"


def test_paths_and_methods_that_do_not_exist() -> None:
    ask = client(saying("x"))
    refused(ask("GET", "/v2/other"), 404, None, "/v2/other")
    found = ask("GET", "/v1/completions")
    refused(found, 405, None, "POST")
    assert found.headers["allow"] == "POST"


def test_other_content_types_are_refused() -> None:
    ask = client(saying("x"))
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        found = ask("POST", "/v1/completions", content=b"{}", headers={"content-type": kind})
        refused(found, 415, "content-type", "application/json")


def test_a_body_that_is_too_large_is_not_read() -> None:
    sent: list[int] = []

    async def pieces() -> Any:
        for count in range(1000):
            sent.append(count)
            yield b" " * 1000

    ask, kind = client(saying("x"), max_body=5000), {"content-type": "application/json"}
    refused(ask("POST", "/v1/completions", content=pieces(), headers=kind), 413, None, "5000")
    assert len(sent) < 20
    refused(ask.complete("x" * 6000), 413, None, "5000")


def test_large_bodies_that_arrive_at_a_time_are_bounded() -> None:
    ask = client(saying("x"), max_bodies=1000)
    for _ in range(3):  # what has been answered does not count
        assert ask.complete("x" * 900).status_code == 200
    found = ask.complete("x" * 1100)
    refused(found, 429, None, "large requests")
    assert found.headers["retry-after"] == "1"


def test_too_many_headers() -> None:
    headers = {f"x-{count}": "1" for count in range(101)}
    refused(client(saying("x"))("GET", "/health", headers=headers), 431, None, "100")


def test_a_full_queue_is_told_before_anything_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = served()
    monkeypatch.setattr(type(model), "encode", lambda *_: pytest.fail("it was tokenised"))
    scheduler = saying("x")
    scheduler.room = 2
    found = client(scheduler, model).complete(["a", "b"], n=2)
    error = refused(found, 429, None, "full")
    assert found.headers["retry-after"] == "2" and error["code"] == "queue_full"
    assert error["type"] == "rate_limit_error" and not scheduler.requests


def test_a_queue_that_fills_up_meanwhile_leaves_nothing_behind() -> None:
    scheduler = saying("x", stuck="queue")
    allowed = iter([0, 0, 0, 1000])  # before the body, after it, and of each answer
    check = scheduler.check_room

    def less_room(requests: int) -> None:
        scheduler.room = 1000 - next(allowed)
        check(requests)

    scheduler.check_room = less_room  # type: ignore[method-assign]
    refused(client(scheduler).complete(["a", "b"]), 429, None)
    assert [ticket.cancelled.is_set() for ticket in scheduler.tickets] == [True]


def test_a_server_that_stops_says_when_to_come_back() -> None:
    scheduler = saying("x")
    scheduler.stopping = True
    for found in (client(scheduler).complete(), client(scheduler)("GET", "/ready")):
        refused(found, 503, None, "shutting down")
        assert int(found.headers["retry-after"]) > 0
    assert client(scheduler)("GET", "/health").status_code == 200


@pytest.mark.parametrize(
    ("error", "status"), [(UserError("too odd"), 400), (Stopping("bye"), 503), (KeyError("x"), 500)]
)
@pytest.mark.parametrize("begun", [False, True])
def test_failures_of_the_decoder(
    error: Exception, status: int, begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ids = [70, 71] if begun else []
    scheduler = Scripted(lambda request: Script(ids, error=error))
    refused(client(scheduler).complete(), status, None)
    found = client(scheduler).complete(stream=True)
    if begun:
        assert found.status_code == 200
        last = json.loads(found.text.strip().splitlines()[-1].removeprefix("data: "))
        assert last["error"]["type"] and "DONE" not in found.text
    else:
        refused(found, status, None)
    events = client(scheduler)("POST", "/v1/responses", json={"input": "hi", "stream": True})
    assert ("response.failed" in events.text) == begun
    if status == 500:
        assert "KeyError" not in found.text + events.text
        assert any(record.exc_info for record in caplog.records)


def test_one_answer_that_fails_ends_the_others_of_its_request_only() -> None:
    scheduler = Scripted(
        lambda request: (
            Script([70], error=KeyError("x"))
            if request.number
            else Script([70] * 9, stuck="decode")
        )
    )
    refused(client(scheduler).complete(n=2), 500, None)
    assert scheduler.tickets[0].cancelled.is_set()


SECRET = "xyzzy"


def test_the_log_has_a_line_for_each_request_and_no_prompt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    ask = client(saying(SECRET, sizes=(2,)))
    secret = {"role": "user", "content": SECRET}
    headers = {"x-request-id": "my-1"}
    body = {"messages": [secret], "n": 2}
    found = ask("POST", "/v1/chat/completions", json=body, headers=headers)
    assert found.headers["x-request-id"] == "my-1"
    for more in ({"top_k": SECRET}, {"stop": [SECRET, 7]}, {"guided_regex": SECRET + "["}):
        ask.chat(messages=[secret], **more)
    ask.chat(messages=[secret, {"role": SECRET}])
    ask.complete([SECRET, 7.5])
    ask.complete(SECRET * CONTEXT)
    ask("POST", "/v1/completions", content=SECRET, headers={"content-type": "application/json"})
    lines = [record for record in caplog.records if record.getMessage() == "request"]
    assert len(lines) == 8
    fields = lines[0].fields  # type: ignore[attr-defined]
    assert fields["id"] == "my-1" and fields["status"] == 200 and fields["model"] == "bytes"
    assert (fields["answers"], fields["finish"], fields["new_tokens"]) == (2, "stop", 12)
    assert fields["accepted"] == 6 and fields["drafted"] == 12 and fields["seconds"] > 0
    written = [logs._Line().format(line) + logs._JsonLine().format(line) for line in caplog.records]
    ours = [
        line
        for record, line in zip(caplog.records, written, strict=True)
        if "httpx" not in record.name
    ]
    assert SECRET not in "".join(ours) and "guided_regex cannot be used" in "".join(ours)
    assert all("\n" not in line for line in written)
    assert "new_tokens=12" in written[caplog.records.index(lines[0])]


def test_prompts_are_logged_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    client(saying("wo\nrld"), log_prompts=True).complete("hel\nlo")
    (line,) = [record for record in caplog.records if record.getMessage() == "request"]
    fields = line.fields  # type: ignore[attr-defined]
    assert fields["prompts"] == "['hel\\nlo']" and fields["answers"] == "['wo\\nrld']"
    assert "\n" not in logs._Line().format(line)


def test_an_id_that_would_forge_the_log_is_replaced() -> None:
    headers = {"x-request-id": 'a" status=200 b'}
    found = client(saying("x"))("GET", "/health", headers=headers)
    assert found.headers["x-request-id"].isalnum()


def test_unknown_fields_are_ignored_and_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logs._noted.clear()
    ask = client(saying("ok"))
    for _ in range(2):
        assert ask.complete(surprise=1).status_code == 200
    assert sum("'surprise'" in record.getMessage() for record in caplog.records) == 1


def test_a_key_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = client(saying("x"), api_key="kéy")
    for headers in ({}, {"authorization": "Bearer no"}, {"authorization": b"Basic k\xe9y"}):
        found = ask("POST", "/v1/completions", json=TEXT, headers=headers)
        error = refused(found, 401, None, "Bearer")
        assert error["code"] == "invalid_api_key" and found.headers["www-authenticate"] == "Bearer"
    right = {"authorization": "Bearer kéy".encode()}
    assert ask("POST", "/v1/completions", json=TEXT, headers=right).status_code == 200
    assert ask("GET", "/v1/models").status_code == 401
    for path in ("/health", "/ready", "/metrics"):
        assert ask("GET", path).status_code == 200


def test_pages_of_other_origins_are_let_in_when_asked_for() -> None:
    asked = {"origin": "http://page", "access-control-request-method": "POST"}
    assert client(saying("x"))("OPTIONS", "/v1/completions", headers=asked).status_code == 405
    ask = client(saying("x"), cors_origins=("http://page",), api_key="key")
    found = ask("OPTIONS", "/v1/completions", headers=asked)
    assert found.status_code == 200
    assert found.headers["access-control-allow-origin"] == "http://page"
    refusal = ask("POST", "/v1/completions", json=TEXT, headers={"origin": "http://page"})
    assert refusal.status_code == 401
    assert refusal.headers["access-control-allow-origin"] == "http://page"
    other = ask("GET", "/health", headers={"origin": "http://other"})
    assert "access-control-allow-origin" not in other.headers


def test_tokenize_and_back() -> None:
    ask = client(saying("x"))
    found = ask("POST", "/tokenize", json={"prompt": "hé"}).json()
    assert found["count"] == len(found["tokens"]) == 3 and found["max_model_len"] == CONTEXT
    back = ask("POST", "/detokenize", json={"tokens": found["tokens"]})
    assert back.json() == {"prompt": "hé"}
    assert ask("POST", "/tokenize", json=CHAT).json()["count"] == 5
    refused(ask("POST", "/tokenize", json={}), 400, "prompt")
    refused(ask("POST", "/detokenize", json={"tokens": [999]}), 400, "tokens")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text("ab<1", max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "name", "a"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
ASK = client(saying("x"))
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat/completions": (ChatBody, CHAT),
    "completions": (CompletionBody, TEXT),
    "responses": (ResponsesBody, {"input": "hi"}),
}


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.data())
def test_no_body_makes_the_server_fail(path: str, data: st.DataObject) -> None:
    kind, right = KINDS[path]
    names = st.sampled_from(sorted(kind.model_fields))
    wrong = data.draw(st.dictionaries(names, JSON, min_size=1, max_size=2))
    body = json.dumps(right | {"max_tokens": 3} | wrong)
    headers = {"content-type": "application/json"}
    found = ASK("POST", f"/v1/{path}", content=body, headers=headers)
    assert found.status_code in (200, 400, 404, 413), found.text
    if found.status_code != 200:
        assert set(found.json()["error"]) == {"message", "type", "param", "code"}


def test_parsing_a_long_wrong_prompt_is_quick() -> None:
    began = time.process_time()
    refused(client(saying("x")).complete([1] * 500_000 + ["x"]), 400, "prompt")
    assert time.process_time() - began < 5
