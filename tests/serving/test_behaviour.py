"""A server on a real port: clients that leave, read slowly or write slowly, and shutdown."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from multirate.serving.requests import Request
from serving.conftest import END, eventually, running, saying, tokens
from serving.schedulers import STAGES, Script, Scripted

BODY = json.dumps({"prompt": "hi", "max_tokens": 1000}).encode()


def head(length: int, path: str = "/v1/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json"]
    return "\r\n".join([*lines, f"content-length: {length}", "", ""]).encode()


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as found:
        yield found


def answer(found: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    pieces = []
    while piece := found.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_leaves_ends_its_request_at_every_stage(stage: str, stream: bool) -> None:
    scheduler = saying("x" * 100, stuck=stage)
    with running(scheduler) as server:
        body = json.dumps({"prompt": ["a", "b"], "stream": stream, "max_tokens": 90}).encode()
        with connected(server.port) as client:
            client.sendall(head(len(body)) + body)
            eventually(lambda: scheduler.reached.count(stage) == 2)
        eventually(lambda: all(ticket.cancelled.is_set() for ticket in scheduler.tickets))
        for _ in scheduler.tickets:
            assert scheduler.ended.acquire(timeout=5)
        metrics = httpx.get(f"{server.url}/metrics").text
        ended = 'vllm:request_success_total{finished_reason="abort",model_name="bytes"} 2.0'
        assert ended in metrics


def test_a_client_that_leaves_during_its_body_costs_nothing() -> None:
    scheduler = saying("x")
    with running(scheduler) as server:
        with connected(server.port) as client:
            client.sendall(head(1000) + b'{"prompt":')
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert not scheduler.requests


def test_a_client_that_leaves_while_its_prompt_is_tokenised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from multirate.serving.model import ServedModel

    begun, go = threading.Event(), threading.Event()

    def slow(self: Any, text: str, special: bool = True) -> list[int]:
        begun.set()
        go.wait(10)
        return tokens(text)

    monkeypatch.setattr(ServedModel, "encode", slow)
    scheduler = saying("x")
    with running(scheduler) as server:
        with connected(server.port) as client:
            client.sendall(head(len(BODY)) + BODY)
            assert begun.wait(5)
            assert httpx.get(f"{server.url}/health").status_code == 200  # nobody else waits
        time.sleep(0.05)
        go.set()
        assert httpx.get(f"{server.url}/ready").status_code == 200
        assert not scheduler.requests


def test_a_slow_reader_holds_up_only_itself() -> None:
    long = "x" * 1500
    scheduler = Scripted(lambda request: Script(tokens(long), sizes=(50,)))
    body = json.dumps(
        {"prompt": "hi", "max_tokens": 1900, "stream": True, "logprobs": 20, "n": 6}
    ).encode()
    with running(scheduler) as server, connected(server.port) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(head(len(body)) + body)
        eventually(lambda: len(scheduler.requests) == 6)
        for _ in range(6):  # the decoder is not held up either
            assert scheduler.ended.acquire(timeout=10)
        asked = {"prompt": "hi", "max_tokens": 1900}
        found = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=10).json()
        assert found["choices"][0]["text"] == long


def test_a_client_that_writes_one_byte_at_a_time_is_cut_off() -> None:
    scheduler = saying("x")
    with running(scheduler, receive_seconds=0.3) as server:
        for begin in (b"", head(len(BODY))):
            with connected(server.port) as client:
                client.sendall(begin)
                left = iter(head(len(BODY)) if not begin else BODY)
                began, closed = time.monotonic(), False
                while not closed and time.monotonic() - began < 5:
                    try:
                        client.sendall(bytes([next(left)]))
                    except OSError:
                        closed = True
                    client.settimeout(0.05)
                    try:
                        found = client.recv(65536)
                        break
                    except TimeoutError:
                        continue
                assert found.startswith(b"HTTP/1.1 408"), found
                assert b'"error"' in found + answer(client)
                assert time.monotonic() - began < 3
        assert not scheduler.requests
        with connected(server.port) as client:  # one that says nothing at all
            assert answer(client).startswith(b"HTTP/1.1 408")


def test_a_kept_connection_may_ask_again_after_a_while() -> None:
    with running(saying("x"), receive_seconds=0.3) as server, httpx.Client() as client:
        for _ in range(3):
            assert client.get(f"{server.url}/health").status_code == 200
            time.sleep(0.1)


def test_an_idle_connection_is_closed_without_a_word() -> None:
    with running(saying("x"), receive_seconds=0.2) as server, connected(server.port) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        found = answer(client)
    assert found.count(b"HTTP/1.1 200") == 1 and b"408" not in found


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"hello\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: " + b"b" * 70_000, b"431"),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20_000, b"431"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"431"),
        (b"\x00" * 100 + b"\r\n\r\n", b"400"),
        (head(10**15) + b"{", b"413"),
        (head(9 << 20), b"413"),
    ],
)
def test_what_is_no_request_gets_an_error_in_openais_shape(sent: bytes, status: bytes) -> None:
    with running(saying("x")) as server:
        with connected(server.port) as client:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            found = answer(client)
        assert found.split(b" ", 2)[1] == status, found
        error = json.loads(found[found.index(b"{") :])["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_body_that_is_too_large_gets_its_answer_and_the_connection_goes_on() -> None:
    with running(saying("x"), max_body=1000) as server, httpx.Client() as client:
        body = {"prompt": "x" * 300_000}
        found = client.post(f"{server.url}/v1/completions", json=body)
        assert found.status_code == 413
        assert client.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 200


def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    scheduler = saying("abc", stuck="decode")
    found: list[httpx.Response] = []
    with running(scheduler, drain_seconds=20) as server, httpx.Client() as other:
        assert other.get(f"{server.url}/ready").status_code == 200
        asked = dict(json={"prompt": "hi"}, timeout=20)
        ask = threading.Thread(
            target=lambda: found.append(httpx.post(f"{server.url}/v1/completions", **asked))
        )
        ask.start()
        eventually(lambda: "decode" in scheduler.reached)
        server.server.handle_exit(15, None)
        eventually(lambda: scheduler.stopping)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/health", timeout=5)
        scheduler.go.set()
        ask.join(10)
        server.thread.join(10)
        assert not server.thread.is_alive()
    assert found[0].json()["choices"][0]["text"] == "abc"


@pytest.mark.parametrize("stream", [False, True])
def test_draining_ends_after_its_time(stream: bool) -> None:
    scheduler = saying("abc", stuck="decode")
    with running(scheduler, drain_seconds=0.2) as server:
        body = json.dumps({"prompt": "hi", "stream": stream}).encode()
        with connected(server.port) as client:
            client.sendall(head(len(body)) + body)
            eventually(lambda: "decode" in scheduler.reached)
            began = time.monotonic()
            server.server.handle_exit(15, None)
            found = answer(client)
            server.thread.join(10)
            assert not server.thread.is_alive() and time.monotonic() - began < 5
        assert (b"HTTP/1.1 503" in found) == (not stream)
        assert b"shutting down" in found and b"DONE" not in found


def test_a_request_during_the_drain_is_told_to_go_elsewhere() -> None:
    scheduler = saying("abc")
    with running(scheduler) as server, httpx.Client() as client:
        client.get(f"{server.url}/health")
        scheduler.stopping = True
        found = client.post(f"{server.url}/v1/completions", json={"prompt": "hi"})
        assert found.status_code == 503 and "retry-after" in found.headers
        assert client.get(f"{server.url}/ready").status_code == 503


def test_a_failure_in_one_request_ends_no_other() -> None:
    def play(request: Request) -> Script:
        if request.prompt[0] == tokens("!")[0]:
            return Script([70, 71], error=RuntimeError("broken"))
        return Script([*request.prompt, END], seconds=0.01)

    with running(Scripted(play)) as server:
        results: dict[str, Any] = {}

        def ask(prompt: str) -> None:
            asked = {"prompt": prompt, "max_tokens": 50}
            results[prompt] = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=20)

        prompts = ["a" * 30, "!1", "b" * 30, "!2", "c" * 30]
        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for prompt, found in results.items():
            if prompt[0] == "!":
                assert found.status_code == 500 and "broken" not in found.text
            else:
                assert found.json()["choices"][0]["text"] == prompt
        assert httpx.get(f"{server.url}/ready").status_code == 200
