"""A scheduler for tests of the HTTP side, which delivers what it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from multirate.decoding.stopping import StopTracker
from multirate.serving.requests import (
    Busy,
    Counters,
    Deliver,
    Emitted,
    Failed,
    Finished,
    PromptRead,
    Request,
    Scheduler,
    Stopping,
    Ticket,
    TokenLogprob,
    Usage,
)

STAGES = ("queue", "prefill", "decode")


@dataclass
class Script:
    """What is delivered for a request."""

    tokens: Sequence[int]
    sizes: Sequence[int] = (1,)
    """Tokens of each step, repeated."""
    stuck: str | None = None
    """The stage in which it waits until it is cancelled or `Scripted.go` is set."""
    seconds: float = 0.0
    """Before each step."""
    error: Exception | None = None
    """What it fails with, after the tokens."""
    cached: int = 0


class _Ticket(Ticket):
    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


def invented(token: int, count: int | None) -> TokenLogprob:
    """Log-probabilities that a test can foresee."""
    top = tuple((token + place, -0.5 - place) for place in range(count or 0))
    return TokenLogprob(-0.5, top)


@dataclass
class Scripted(Scheduler):
    """Delivers what `play` says for a request, each on a thread of its own."""

    play: Callable[[Request], Script]
    room: int = 1000
    requests: list[Request] = field(default_factory=list)
    tickets: list[_Ticket] = field(default_factory=list)
    reached: list[str] = field(default_factory=list)
    """The stages that requests waited in."""
    checks: int = 0

    def __post_init__(self) -> None:
        self.go = threading.Event()
        self.stopping = False
        self.stopped = threading.Event()
        self.ended = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._counted = Counters()

    def check_room(self, requests: int) -> None:
        self.checks += 1
        if self.stopping:
            raise Stopping("the server is shutting down")
        if requests > self.room:
            raise Busy("the queue is full", 1.2)

    def submit(self, request: Request, deliver: Deliver) -> Ticket:
        self.check_room(1)
        ticket, script = _Ticket(), self.play(request)
        thread = threading.Thread(target=self._run, args=(request, script, deliver, ticket))
        with self._lock:
            self.requests.append(request)
            self.tickets.append(ticket)
            self._threads.append(thread)
        thread.start()
        return ticket

    def counters(self) -> Counters:
        with self._lock:
            return Counters(**(vars(self._counted) | {"accepted_at": [3, 1]}))

    def drain(self, seconds: float) -> None:
        self.stopping = True
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self.stopped.set()

    def _run(self, request: Request, script: Script, deliver: Deliver, ticket: _Ticket) -> None:
        try:
            if all(self._passes(stage, script, ticket) for stage in ("queue", "prefill")):
                self._deliver(request, script, deliver, ticket)
            if self.stopped.is_set() and not ticket.cancelled.is_set():
                deliver(Failed(Stopping("the server is shutting down")))
        finally:
            self.ended.release()

    def _passes(self, stage: str, script: Script, ticket: _Ticket) -> bool:
        """Waits if the script says so. Returns whether the request goes on."""
        if script.stuck == stage:
            self.reached.append(stage)
            while not self.go.wait(0.005):
                if ticket.cancelled.is_set() or self.stopped.is_set():
                    return False
        return not ticket.cancelled.is_set()

    def _deliver(self, request: Request, script: Script, deliver: Deliver, ticket: _Ticket) -> None:
        likely = [None, *(invented(token, request.logprobs) for token in request.prompt[1:])]
        deliver(PromptRead(script.cached, tuple(likely) if request.prompt_logprobs else ()))
        tracker = StopTracker(request.stop, [len(request.prompt)], 10_000)
        left, steps = list(script.tokens), 0
        while left and tracker.reasons[0] is None:
            size = script.sizes[steps % len(script.sizes)]
            kept = tuple(tracker.push(0, left[:size]))
            left, steps = left[size:], steps + 1
            time.sleep(script.seconds)
            chances = tuple(invented(token, request.logprobs) for token in kept)
            origins = ("draft",) * (len(kept) - 1) + ("model",)
            deliver(Emitted(kept, origins, chances if request.logprobs is not None else ()))
            if not self._passes("decode", script, ticket):
                return
        new = len(tracker.new_tokens[0])
        with self._lock:
            self._counted.new_tokens += new
            self._counted.prompt_tokens += len(request.prompt)
        if script.error is not None:
            deliver(Failed(script.error))
            return
        usage = Usage(
            prompt_tokens=len(request.prompt),
            cached_tokens=script.cached,
            new_tokens=new,
            steps=steps,
            drafted=2 * (new - steps),
            accepted=new - steps,
            prefill_seconds=0.25,
            decode_seconds=0.5,
        )
        deliver(Finished(tracker.reasons[0] or "eos", usage))
