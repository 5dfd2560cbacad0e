"""A served model whose tokens are bytes, so that a script can say any text."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx
import pytest
from lab.bench import tiny_model

from multirate.decoding.logits import SamplingSettings
from multirate.serving.app import make_app
from multirate.serving.connections import Server, bound
from multirate.serving.model import ServedModel
from multirate.serving.requests import Request, Scheduler
from multirate.serving.settings import HttpSettings
from serving.schedulers import Script, Scripted

WORDS = tiny_model.tokenizer()
END = WORDS.eos_token_id
CONTEXT = 2000


def tokens(text: str, end: bool = True) -> list[int]:
    return [*WORDS(text)["input_ids"], *([END] if end else [])]


def served(**changes: Any) -> ServedModel:
    fields: dict[str, Any] = dict(
        name="bytes",
        tokenizer=WORDS,
        vocabulary=len(WORDS),
        context=CONTEXT,
        ends=(END,),
        sampling=lambda **given: SamplingSettings(**given),
        method="lookup",
    )
    return ServedModel(**fields | changes)


def saying(text: str, **how: Any) -> Scripted:
    """A scheduler that answers every prompt with `text`."""
    return Scripted(lambda request: Script(tokens(text), **how))


@dataclass
class Client:
    """Asks the application without a network."""

    scheduler: Any
    settings: HttpSettings
    model: ServedModel

    @cached_property
    def app(self) -> Any:
        return make_app(self.model, self.scheduler, self.settings)

    def __call__(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **more)

        return asyncio.run(ask())

    def chat(self, **body: Any) -> httpx.Response:
        asked = {"messages": [{"role": "user", "content": "hi"}]} | body
        return self("POST", "/v1/chat/completions", json=asked)

    def complete(self, prompt: Any = "hi", **body: Any) -> httpx.Response:
        return self("POST", "/v1/completions", json={"prompt": prompt} | body)


def client(scheduler: Any, model: ServedModel | None = None, **settings: Any) -> Client:
    return Client(scheduler, HttpSettings(**settings), model or served())


@dataclass
class Running:
    """A server on a port of its own."""

    url: str
    port: int
    server: Server
    thread: threading.Thread


@contextmanager
def running(
    scheduler: Scheduler, model: ServedModel | None = None, **settings: Any
) -> Iterator[Running]:
    options = HttpSettings(**{"drain_seconds": 0.2} | settings)
    app = make_app(model or served(), scheduler, options)
    listener = bound("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = Server(app, scheduler, options)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        eventually(lambda: server.started)
        yield Running(f"http://127.0.0.1:{port}", port, server, thread)
    finally:
        server.force_exit = server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def eventually(holds: Callable[[], Any], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@pytest.fixture
def echo() -> Scripted:
    """Says the prompt's own text again."""
    return Scripted(lambda request: Script([*request.prompt, END]))


def prompt_text(request: Request) -> str:
    return str(WORDS.decode(list(request.prompt)))
