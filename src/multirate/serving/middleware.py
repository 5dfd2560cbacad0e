"""What happens to every HTTP request before and after its endpoint."""

from __future__ import annotations

import hmac
import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from multirate.serving.errors import ApiError, ClientGone, api_error
from multirate.serving.logs import Record, log, request_id
from multirate.serving.page import OPEN as PAGE
from multirate.serving.settings import HttpSettings

MONITORED = frozenset({"/health", "/ready", "/metrics"})
"""What monitors read every few seconds: not logged while all is well."""
OPEN = MONITORED | PAGE
"""What is answered without a key."""
CLIENT_LEFT = 499
"""nginx's status, for the log: nobody receives it."""


def header(scope: Scope, name: bytes) -> str | None:
    """A request's header, or None."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


class Logged:
    """Gives every request an id and a line in the log. An exception that nothing else has handled
    becomes status 500, and ends only this request.
    """

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = request_id(header(scope, b"x-request-id"))
        record = Record(name, scope["method"], scope["path"][:200])
        scope.setdefault("state", {})["record"] = record
        began = time.perf_counter()

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        try:
            if len(scope["headers"]) > self._settings.max_headers:
                most = self._settings.max_headers
                raise ApiError(f"the request has too many headers; accepted: {most}", status=431)
            await self._app(scope, receive, marked)
        except ClientGone:
            record.status, record.finish = CLIENT_LEFT, "abort"
        except Exception as error:
            await self._answer(error, record, scope, receive, marked)
        finally:
            routine = record.path in MONITORED and record.status < 400
            level = logging.DEBUG if routine else logging.INFO
            fields = record.fields(time.perf_counter() - began)
            log.log(level, "request", extra={"fields": fields})

    async def _answer(
        self, error: Exception, record: Record, scope: Scope, receive: Receive, send: Send
    ) -> None:
        record.error = api_error(error)
        if record.error.status >= 500:
            log.error("unexpected", exc_info=error, extra={"fields": {"id": record.id}})
        if not record.status:
            await record.error.response()(scope, receive, send)


class KeyChecked:
    """Refuses requests without the API key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN and not self._admits(scope):
            error = ApiError(
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            scope["state"]["record"].error = error
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        kind, _, given = (header(scope, b"authorization") or "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("latin-1"), self._key)
        return kind.lower() == "bearer" and same


def cors(settings: HttpSettings) -> dict[str, Any]:
    """Options of starlette's CORSMiddleware."""
    return {
        "allow_origins": list(settings.cors_origins),
        "allow_methods": ["GET", "POST"],
        "allow_headers": ["authorization", "content-type", "x-request-id"],
        "expose_headers": ["x-request-id", "retry-after"],
    }
