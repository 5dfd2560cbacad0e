"""The page at /: a chat, a race of plain decoding and drafts, and charts. Its files are sent as
they are, and ask no other server for anything.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from multirate.methods.spec import PLAIN
from multirate.serving.model import ServedModel
from multirate.serving.settings import HttpSettings

_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
FILES = {
    "/" if path.name == "index.html" else f"/page/{path.name}": path
    for path in sorted(_FOLDER.iterdir())
    if path.suffix in _TYPES
}
"""Path of a route → its file."""
SERVER = "/page/server.json"
OPEN = frozenset({*FILES, SERVER})
"""What is shown without a key: the page asks for the key."""
_SAFE = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_CACHED = {"cache-control": "no-cache"}  # asked for each time, and sent only when it has changed


class _File:
    """A file, read once."""

    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._headers = {
            **_SAFE,
            **_CACHED,
            "etag": f'"{hashlib.sha256(self._content).hexdigest()[:32]}"',
            "content-type": f"{_TYPES[path.suffix]}; charset=utf-8",
        }

    async def __call__(self, request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if self._headers["etag"] in known:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers)


def add_page(app: FastAPI, model: ServedModel, settings: HttpSettings) -> None:
    """Adds the page's routes."""
    server = {
        "model": model.name,
        "method": None if model.method == PLAIN else model.method,
        "context": model.context,
        "max_tokens": settings.max_tokens,
        "needs_key": settings.api_key is not None,
    }

    async def about(request: Request) -> Response:
        return JSONResponse(server, headers=_SAFE | _CACHED)

    app.add_route(SERVER, about, include_in_schema=False)
    for path, file in FILES.items():
        app.add_route(path, _File(file).__call__, include_in_schema=False)
