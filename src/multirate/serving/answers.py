"""The answers to one HTTP request, from submitting them to their last event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from multirate.decoding.text_stream import TextStream
from multirate.serving.metrics import Metrics
from multirate.serving.model import ServedModel
from multirate.serving.origins import Origins, Piece
from multirate.serving.parts import Call, Part, Reader, Said, Thought
from multirate.serving.pieces import in_pieces
from multirate.serving.requests import (
    Deliver,
    Emitted,
    Event,
    Failed,
    Finished,
    PromptRead,
    Request,
    Scheduler,
    Ticket,
    TokenLogprob,
    Usage,
)
from multirate.serving.stop_strings import StopStrings

FINISH = {"eos": "stop", "stop_string": "stop", "length": "length", "context": "length"}
"""Our reasons to end, by OpenAI's names."""


@dataclass
class Update:
    """What one event adds to an answer."""

    choice: Choice
    read: PromptRead | None = None
    parts: list[Part] = field(default_factory=list)
    tokens: Sequence[int] = ()
    """The new tokens, if their log-probabilities were asked for."""
    logprobs: Sequence[TokenLogprob] = ()
    origins: list[Piece] = field(default_factory=list)
    """The new text by token, if asked for: before it is divided into parts."""
    finish: str | None = None


class Choice:
    """One answer: its events as text, and all of it so far."""

    def __init__(
        self,
        index: int,
        request: Request,
        model: ServedModel,
        reader: Reader,
        stops: Sequence[str] = (),
        origins: bool = False,
    ) -> None:
        """index: OpenAI's number of the answer. stops: texts that it ends before. origins: whether
        updates say who proposed which token.
        """
        self.index = index
        self.request = request
        self._ends = frozenset(model.ends)
        self._reader = reader
        self._stop = StopStrings(stops)
        self._pieces: list[str] = []
        self._origins = Origins() if origins else None
        skips = not reader.keeps_special
        self._stream = TextStream(model.tokenizer, self._pieces.append, skips)
        self._emitted = self._accepted = 0
        self._said: list[str] = []
        self._thought: list[str] = []
        self.calls: list[Call] = []
        self.tokens: list[int] = []
        """Those that log-probabilities belong to."""
        self.logprobs: list[TokenLogprob] = []
        self.read = PromptRead(0)
        self.usage: Usage | None = None
        self.finish: str | None = None

    @property
    def said(self) -> str:
        return "".join(self._said)

    @property
    def thought(self) -> str:
        return "".join(self._thought)

    def take(self, event: PromptRead | Emitted | Finished) -> Update:
        """Adds an event."""
        update = Update(self)
        if isinstance(event, PromptRead):
            self.read = update.read = event
        elif isinstance(event, Emitted) and self._stop.met:
            # The decoder reads special tokens as text and did not see the stop string.
            self._end("stop", self._usage_so_far(), update)
        elif isinstance(event, Emitted):
            self._emitted += len(event.tokens)
            self._accepted += sum(origin != "model" for origin in event.origins)
            self._decode(event)
            if event.logprobs:
                update.tokens, update.logprobs = event.tokens, event.logprobs
                self.tokens += event.tokens
                self.logprobs += event.logprobs
            self._advance(update)
        else:
            self._stream.end()
            if self._origins is not None:
                self._origins.add("".join(self._pieces))
            self._advance(update)
            finish = "stop" if self._stop.met else FINISH[event.reason]
            self._end(finish, event.usage, update)
        return update

    def _decode(self, event: Emitted) -> None:
        for token, origin in zip(event.tokens, event.origins, strict=True):
            if token not in self._ends:
                before = len(self._pieces)
                self._stream.push([token])
                if self._origins is not None:
                    self._origins.add("".join(self._pieces[before:]), origin)

    def _advance(self, update: Update) -> None:
        text = self._stop.push("".join(self._pieces))
        self._pieces.clear()
        self._show(text, update)

    def _show(self, text: str, update: Update) -> None:
        if self._origins is not None:
            update.origins += self._origins.take(len(text))
        self._add(self._reader.push(text), update)

    def _end(self, finish: str, usage: Usage, update: Update) -> None:
        self._show(self._stop.end(), update)
        if self._origins is not None:
            update.origins += self._origins.end()
        self._add(self._reader.end(), update)
        self.usage = usage
        called = self.calls and finish == "stop"
        self.finish = update.finish = "tool_calls" if called else finish

    def _add(self, parts: Sequence[Part], update: Update) -> None:
        update.parts += parts
        for part in parts:
            if isinstance(part, Said):
                self._said.append(part.text)
            elif isinstance(part, Thought):
                self._thought.append(part.text)
            else:
                self.calls.append(part)

    def _usage_so_far(self) -> Usage:
        """Of an answer that ends at a stop string that the decoder did not see."""
        return Usage(
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.read.cached,
            new_tokens=self._emitted,
            drafted=self._accepted,
            accepted=self._accepted,
        )


class Answers:
    """Decodes choices at the same time and hands out what happens to them, in order. Used on the
    event loop that made it.
    """

    def __init__(
        self, scheduler: Scheduler, choices: Sequence[Choice], metrics: Metrics, started: float
    ) -> None:
        """started: when the request arrived, by time.perf_counter."""
        self.choices = choices
        self._scheduler = scheduler
        self._metrics = metrics
        self._started = started
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[Choice, Event, float]] = asyncio.Queue()
        self._tickets: dict[int, Ticket] = {}
        self._latest: dict[int, float] = {}

    def submit(self) -> None:
        """Queues all. Raises what `Scheduler.submit` raises; then none is queued."""
        try:
            for choice in self.choices:
                ticket = self._scheduler.submit(choice.request, self._deliver_to(choice))
                self._tickets[choice.index] = ticket
        except BaseException:
            self.close()
            raise

    async def next(self) -> Update | None:
        """What happens next; None after the last. Raises the error of a choice that failed."""
        if not self._tickets:
            return None
        choice, event, at = await self._events.get()
        while choice.index not in self._tickets:  # under way when the choice was cancelled
            choice, event, at = await self._events.get()
        if isinstance(event, Failed):
            del self._tickets[choice.index]
            self._metrics.finished("error", at - self._started)
            raise event.error
        if isinstance(event, Emitted):
            self._measure(choice, len(event.tokens), at)
        update = choice.take(event)
        if update.finish is not None:
            ticket = self._tickets.pop(choice.index)
            if not isinstance(event, Finished):
                ticket.cancel()
            self._metrics.finished(update.finish, at - self._started)
        return update

    def close(self) -> None:
        """Cancels what is not finished."""
        for ticket in self._tickets.values():
            ticket.cancel()
            self._metrics.finished("abort", time.perf_counter() - self._started)
        self._tickets.clear()

    def _deliver_to(self, choice: Choice) -> Deliver:
        put: Callable[[tuple[Choice, Event, float]], None] = self._events.put_nowait

        def deliver(event: Event) -> None:
            try:
                self._loop.call_soon_threadsafe(put, (choice, event, time.perf_counter()))
            except RuntimeError:  # the loop is closed: the server has stopped
                return

        return in_pieces(deliver)

    def _measure(self, choice: Choice, tokens: int, at: float) -> None:
        before = self._latest.get(choice.index)
        if before is None:
            self._metrics.first_token(at - self._started)
        else:
            self._metrics.next_tokens((at - before) / max(tokens, 1), tokens)
        self._latest[choice.index] = at
