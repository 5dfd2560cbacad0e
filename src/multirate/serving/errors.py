"""Errors as clients see them: OpenAI's shape, and the HTTP status that says whose fault it is."""

from __future__ import annotations

import math
from typing import Any

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from multirate.errors import UserError
from multirate.serving.requests import Busy, Stopping

RETRY_AFTER_STOP = 10
"""Seconds after which another server is likely to have taken over."""


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        logged: str | None = None,
    ) -> None:
        """param: the field of the body. logged: what the log says instead of a message that quotes
        the client.
        """
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code
        self.headers = headers or {}
        self.logged = logged or message

    def body(self) -> dict[str, Any]:
        """`{"error": {message, type, param, code}}`."""
        return {
            "error": {
                "message": self.message,
                "type": _kind(self.status),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


def api_error(error: Exception) -> ApiError:
    """What the client is told about an exception. What no client caused stays unexplained: the log
    has it.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        seconds = {"retry-after": str(max(1, math.ceil(error.retry_after)))}
        return ApiError(str(error), None, 429, "queue_full", seconds)
    if isinstance(error, Stopping):
        seconds = {"retry-after": str(RETRY_AFTER_STOP)}
        return ApiError(str(error), None, 503, "stopping", seconds)
    if isinstance(error, UserError):
        return ApiError(str(error))
    if isinstance(error, HTTPException):
        return ApiError(str(error.detail), None, error.status_code, None, dict(error.headers or {}))
    return ApiError("the server failed to answer; its log has the reason", None, 500, "internal")


def of_validation(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body. It names the field and never its value, which may
    be a prompt.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    names = [str(part) for part in first["loc"]]
    where = ".".join(names) or "the body"
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(f"{where}: {message}", names[0] if names else None, code="invalid_value")


def install(app: FastAPI) -> None:
    """Gives every error of `app` OpenAI's shape."""

    async def known(request: Request, error: Exception) -> JSONResponse:
        found = api_error(error)
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            asked = f"{request.method} {request.url.path}"
            allowed = found.headers.get("Allow", "another method")
            missing = error.status_code == 404
            found.message = f"{asked}: " + ("no such path" if missing else f"accepted: {allowed}")
        request.scope["state"]["record"].error = found
        return found.response()

    for kind in (ApiError, UserError, HTTPException):
        app.add_exception_handler(kind, known)


def _kind(status: int) -> str:
    """OpenAI's names for kinds of errors."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    if status in kinds:
        return kinds[status]
    return "server_error" if status >= 500 else "invalid_request_error"
