"""The requests that wait, and the counters: what the decoding thread shares with others."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from multirate.serving.requests import (
    Busy,
    Counters,
    Deliver,
    Event,
    Request,
    Stopping,
    Ticket,
    TokenLogprob,
)
from multirate.serving.settings import ServingSettings

log = logging.getLogger(__name__)

_LEAST_WAIT, _MOST_WAIT = 1.0, 60.0  # seconds that a refused client is told to wait


@dataclass(eq=False)
class Submission(Ticket):
    """A submitted request. wake: called when it is cancelled. joined, first: when it took a place
    in the batch, and when its prompt had been read; 0: not yet. cached: tokens of the prompt that
    were kept. logprobs: of tokens that are chosen and not emitted yet.
    """

    request: Request
    deliver: Deliver
    wake: Callable[[], None]
    submitted: float = field(default_factory=time.perf_counter)
    joined: float = 0.0
    first: float = 0.0
    cached: int = 0
    cancelled: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])

    def cancel(self) -> None:
        self.cancelled = True
        self.wake()

    def tell(self, event: Event) -> None:
        """Delivers an event, if anyone wants it."""
        if self.cancelled:
            return
        try:
            self.deliver(event)
        except Exception:
            log.exception("an event could not be delivered; its request is cancelled")
            self.cancelled = True


class Queue:
    """A bounded queue, and counters. Any thread may call everything."""

    def __init__(self, settings: ServingSettings) -> None:
        self._settings = settings
        self._changed = threading.Condition()
        self._waiting: deque[Submission] = deque()
        self._counters = Counters()
        self._closed = self._abandoned = False

    # -- who submits -------------------------------------------------------------------------------

    def check_room(self, requests: int, tokens: int = 0) -> None:
        """As `Scheduler.check_room`, for requests of so many prompt tokens."""
        with self._changed:
            if self._closed:
                raise Stopping("the server is shutting down")
            counters, settings = self._counters, self._settings
            free = max(settings.parallel - counters.running, 0)
            if counters.waiting + requests > free + settings.max_queue:
                most = settings.max_queue
                raise self._busy(f"{counters.waiting} requests are waiting; the maximum is {most}")
            limit, waiting = settings.max_queue_tokens, counters.waiting_tokens
            if limit is not None and counters.waiting and waiting + tokens > limit:
                raise self._busy(f"{waiting} prompt tokens are waiting; the maximum is {limit}")

    def _busy(self, message: str) -> Busy:
        """A place is likely to be free after a request's time, over the places."""
        done = max(self._counters.finished, 1)
        seconds = self._counters.request_seconds / done / self._settings.parallel
        return Busy(message, min(max(seconds, _LEAST_WAIT), _MOST_WAIT))

    def put(self, submission: Submission) -> None:
        """Raises as `check_room`."""
        with self._changed:
            self.check_room(1, len(submission.request.prompt))
            self._waiting.append(submission)
            self._count()
            self._changed.notify()

    def wake(self) -> None:
        """Whoever waits for work looks again."""
        with self._changed:
            self._changed.notify()

    def close(self, abandon: bool = False) -> None:
        """Takes no more requests. abandon: those that are here need not be finished either."""
        with self._changed:
            self._closed, self._abandoned = True, self._abandoned or abandon
            self._changed.notify()

    # -- who decodes -------------------------------------------------------------------------------

    def wait(self, idle: Callable[[], None]) -> bool:
        """Waits for work, after calling `idle`, if there is none. False: there will be none."""
        with self._changed:
            if not self._has_work():
                idle()
            while not (self._has_work() or self._closed):
                self._changed.wait()
            return self._has_work() and not self._abandoned

    def _has_work(self) -> bool:
        return bool(self._waiting or self._counters.running)

    def take(self, fits: Callable[[Request], bool]) -> Submission | None:
        """The one that has waited longest, if it fits; the others wait for it."""
        with self._changed:
            if not self._waiting or not fits(self._waiting[0].request):
                return None
            found = self._waiting.popleft()
            self._count()
            return found

    def drop_cancelled(self) -> None:
        """Cancelled requests leave."""
        with self._changed:
            self._waiting = deque(one for one in self._waiting if not one.cancelled)
            self._count()

    def clear(self) -> list[Submission]:
        """All requests leave."""
        with self._changed:
            found, self._waiting = list(self._waiting), deque()
            self._count()
            return found

    def _count(self) -> None:
        self._counters.waiting = len(self._waiting)
        self._counters.waiting_tokens = sum(len(one.request.prompt) for one in self._waiting)

    # -- counters ----------------------------------------------------------------------------------

    @contextmanager
    def counting(self) -> Iterator[Counters]:
        """The counters, to change."""
        with self._changed:
            yield self._counters

    def counters(self) -> Counters:
        """A copy."""
        with self._changed:
            return replace(self._counters, accepted_at=list(self._counters.accepted_at))
