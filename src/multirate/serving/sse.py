"""Server-sent events: how an answer is streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from multirate.serving.errors import ClientGone

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def encoded(payload: Any) -> str:
    """JSON on one line."""
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def data(payload: Any) -> bytes:
    """An event of the completions and chat streams."""
    return f"data: {encoded(payload)}\n\n".encode()


def named(payload: dict[str, Any]) -> bytes:
    """An event of the Responses stream, under its type's name."""
    return f"event: {payload['type']}\ndata: {encoded(payload)}\n\n".encode()


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, whose body must have been received. Cancels it and raises ClientGone
    if the client closes the connection before.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come. A client that reads slowly holds up nothing but its own stream."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        """close: called in the end, whatever the reason."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._send_all(send))
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
