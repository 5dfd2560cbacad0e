"""uvicorn with what it lacks: a limit on how long a request's head may take, errors in OpenAI's
shape below the application, and a shutdown that drains.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from types import FrameType

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from multirate.errors import UserError
from multirate.serving.errors import ApiError
from multirate.serving.logs import log
from multirate.serving.requests import Scheduler
from multirate.serving.settings import HttpSettings

GRACE = 5
"""Seconds that streams have to tell their clients after the drain."""
MOST_HEAD = 64 << 10
"""Bytes of a request's line and headers."""


def protocol_with(seconds: float) -> type[H11Protocol]:
    """The protocol of a connection that is closed if a request's head, or a body that nobody reads
    any more, takes longer.
    """

    class Protocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def send_400_response(self, msg: str) -> None:
            status = getattr(sys.exc_info()[1], "error_status_hint", 400)
            words = (
                "the request's head is too large" if status == 431 else "this is no HTTP request"
            )
            self._refuse(status, words)

        def _watch(self) -> None:
            """Starts the clock when the client begins to owe something, and stops it after."""
            owes = self.conn.their_state is h11.IDLE or (
                self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE
            )
            if not owes or self.transport.is_closing():
                self._forget()
            elif self._timer is None:
                self._timer = self.loop.call_later(seconds, self._expire)

        def _forget(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _expire(self) -> None:
            self._timer = None
            begun = self.cycle is None or self.conn.trailing_data[0]
            if self.conn.our_state is h11.IDLE and begun:
                self._refuse(408, f"the request's head did not arrive within {seconds:g} seconds")
            else:
                self.transport.close()

        def _refuse(self, status: int, message: str) -> None:
            log.info("refused", extra={"fields": {"status": status, "error": message}})
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                body = json.dumps(ApiError(message, status=status).body()).encode()
                headers = [
                    (b"content-type", b"application/json"),
                    (b"content-length", str(len(body)).encode()),
                    (b"connection", b"close"),
                ]
                reason = STATUS_PHRASES[status]
                head = h11.Response(status_code=status, headers=headers, reason=reason)
                for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

    return Protocol


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, for `Server.run([socket])`. Raises UserError if it is in use or not
    this machine's.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot listen on {host} port {port}: {reason}") from None
    return found


class Server(uvicorn.Server):
    """Ends with code 0 after SIGTERM or Ctrl-C, once the running requests have finished or their
    time is over. A second signal ends it at once.
    """

    def __init__(self, app: FastAPI, scheduler: Scheduler, settings: HttpSettings) -> None:
        self._scheduler = scheduler
        self._drain_seconds = settings.drain_seconds
        config = uvicorn.Config(
            app,
            http=protocol_with(settings.receive_seconds),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=round(settings.drain_seconds) + GRACE,
            h11_max_incomplete_event_size=MOST_HEAD,
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("draining", extra={"fields": {"most_seconds": self._drain_seconds}})
        drain = threading.Thread(
            target=self._scheduler.drain, args=(self._drain_seconds,), daemon=True
        )
        drain.start()
        await super().shutdown(sockets)
        while drain.is_alive() and not self.force_exit:
            await asyncio.sleep(0.02)
        log.info("stopped")
