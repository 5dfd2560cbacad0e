"""Reads a request's body, within its limits."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from multirate.serving.bodies import Body
from multirate.serving.errors import ApiError, ClientGone, of_validation
from multirate.serving.logs import note_once
from multirate.serving.settings import HttpSettings

B = TypeVar("B", bound=Body)


async def read_body(request: Request, settings: HttpSettings) -> bytes:
    """The bytes. Raises ApiError for a body that is no JSON by its type, too large, or too slow,
    before all of it has been read; ClientGone if the client leaves.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            f"the content type is {kind[:60]!r}; accepted: application/json", "content-type", 415
        )
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > settings.max_body:
        raise _too_large(settings)
    try:
        return await asyncio.wait_for(_collect(request, settings), settings.receive_seconds)
    except asyncio.TimeoutError:
        seconds = settings.receive_seconds
        raise ApiError(
            f"the body did not arrive within {seconds:g} seconds",
            status=408,
            headers={"connection": "close"},
        ) from None
    except ClientDisconnect:
        raise ClientGone from None


async def _collect(request: Request, settings: HttpSettings) -> bytes:
    found = bytearray()
    async for piece in request.stream():
        found += piece
        if len(found) > settings.max_body:
            raise _too_large(settings)
    return bytes(found)


def parsed(kind: type[B], data: bytes) -> B:
    """The body. Raises ApiError for what is no JSON or not of that kind."""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise of_validation(error) from error
    for name in body.unknown():
        note_once(f"ignoring the unknown field {name[:60]!r} of a request")
    return body


def _too_large(settings: HttpSettings) -> ApiError:
    return ApiError(
        f"the body is too large; accepted: {settings.max_body} bytes", None, 413, "body_too_large"
    )
