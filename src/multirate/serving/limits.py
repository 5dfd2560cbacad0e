"""Reads a request's body, within its limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from multirate.serving.bodies import Body
from multirate.serving.errors import ApiError, ClientGone, of_validation
from multirate.serving.logs import note_once
from multirate.serving.requests import Busy
from multirate.serving.settings import HttpSettings

B = TypeVar("B", bound=Body)


class Buffered:
    """How many bytes of bodies are held."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.bytes = 0

    def add(self, count: int) -> None:
        """Raises Busy if they are too many; a negative count gives them back."""
        if count > 0 and self.bytes + count > self._most:
            raise Busy("too many large requests arrive at a time", 1.0)
        self.bytes += count


@asynccontextmanager
async def read_body(
    request: Request, settings: HttpSettings, buffered: Buffered
) -> AsyncIterator[bytearray]:
    """The bytes, which count as buffered within the context. Raises ApiError for a body that is no
    JSON by its type, too large, or too slow, before all of it has been read; ClientGone if the
    client leaves.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            f"the content type is {kind[:60]!r}; accepted: application/json", "content-type", 415
        )
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > settings.max_body:
        raise _too_large(settings)
    found = bytearray()
    try:
        await _collect(request, found, settings, buffered)
        yield found
    finally:
        buffered.add(-len(found))


async def _collect(
    request: Request, found: bytearray, settings: HttpSettings, buffered: Buffered
) -> None:
    seconds = settings.receive_seconds
    try:
        await asyncio.wait_for(_add_pieces(request, found, settings, buffered), seconds)
    except asyncio.TimeoutError:
        message = f"the body did not arrive within {seconds:g} seconds"
        raise ApiError(message, status=408, headers={"connection": "close"}) from None
    except ClientDisconnect:
        raise ClientGone from None


async def _add_pieces(
    request: Request, found: bytearray, settings: HttpSettings, buffered: Buffered
) -> None:
    async for piece in request.stream():
        if len(found) + len(piece) > settings.max_body:
            raise _too_large(settings)
        buffered.add(len(piece))
        found += piece


def parsed(kind: type[B], data: bytearray) -> B:
    """The body. Raises ApiError for what is no JSON or not of that kind."""
    try:
        found = from_json(bytes(data), allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is no JSON: {error}", code="invalid_json") from None
    try:
        body = kind.model_validate(found)
    except ValidationError as error:
        raise of_validation(error) from error
    for name in body.unknown():
        note_once(f"ignoring the unknown field {name[:60]!r} of a request")
    return body


def _too_large(settings: HttpSettings) -> ApiError:
    return ApiError(
        f"the body is too large; accepted: {settings.max_body} bytes", None, 413, "body_too_large"
    )
