"""The decoding thread: requests wait, join the batch between two steps, and leave it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import psutil
from torch import Tensor

from multirate.decoding.batch import Batch, Joining
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.results import Origin
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.engine import Engine
from multirate.errors import UserError
from multirate.runtime.decoder import Decoder
from multirate.serving.logprobs import of_prompt, of_token
from multirate.serving.reading_pace import ReadingPace
from multirate.serving.requests import (
    Busy,
    Counters,
    Deliver,
    Emitted,
    Event,
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
from multirate.serving.settings import ServingSettings

log = logging.getLogger(__name__)

_MOST_SHARED = 64
"""A prompt waits for another one that is being read if so many more tokens will be kept then."""


def start(engine: Engine, settings: ServingSettings) -> BatchScheduler:
    """A scheduler whose thread runs. Raises UserError for a method that requests cannot share."""
    return BatchScheduler(engine, settings)


@dataclass(eq=False)
class Job(Ticket):
    """A request on its way. seq: its place in the batch, while it has one."""

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
        if self.cancelled:
            return
        try:
            self.deliver(event)
        except Exception:
            log.exception("an event could not be delivered; its request is cancelled")
            self.cancelled = True


class BatchScheduler(Scheduler):
    """Decodes requests in a Batch. See `start`."""

    def __init__(self, engine: Engine, settings: ServingSettings) -> None:
        self._engine, self._settings = engine, settings
        self._changed = threading.Condition()
        # under the condition
        self._waiting: deque[Job] = deque()
        self._counters = Counters()
        self._stopping = self._abandons = False
        # of the decoding thread
        self._running: dict[int, Job] = {}
        self._before = Counters()  # of batches that were given up
        self._pace = ReadingPace()
        self._memory = settings.kv_memory or psutil.virtual_memory().available // 2
        self._ready = threading.Event()
        self._refused: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._refused is not None:
            raise self._refused

    # -- any thread --------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether requests are decoded. False after `drain`, or if the thread died."""
        return self._thread.is_alive()

    def check_room(self, requests: int) -> None:
        with self._changed:
            self._check_room(requests, 0)

    def _check_room(self, requests: int, tokens: int) -> None:
        if self._stopping:
            raise Stopping("the server is shutting down")
        counters, settings = self._counters, self._settings
        free = max(settings.parallel - counters.running, 0)
        if counters.waiting + requests > free + settings.max_queue:
            what = f"{counters.waiting} requests are waiting; the maximum is {settings.max_queue}"
            raise Busy(what, self._soon())
        most = settings.max_queue_tokens
        if most is not None and counters.waiting and counters.waiting_tokens + tokens > most:
            what = f"{counters.waiting_tokens} prompt tokens are waiting; the maximum is {most}"
            raise Busy(what, self._soon())

    def _soon(self) -> float:
        """Seconds until a place is likely to be free: a request's time, over the places."""
        done = max(self._counters.finished, 1)
        return min(max(self._counters.request_seconds / done / self._settings.parallel, 1.0), 60.0)

    def submit(self, request: Request, deliver: Deliver) -> Ticket:
        request = self._checked(request)
        job = Job(request, deliver, self._wake)
        with self._changed:
            self._check_room(1, len(request.prompt))
            self._waiting.append(job)
            self._count_waiting()
            self._changed.notify()
        return job

    def _checked(self, request: Request) -> Request:
        """With the server's limit on the context. Raises UserError for a prompt out of it."""
        info, prompt = self._engine.decoder.info, request.prompt
        if not prompt:
            raise UserError("the prompt is empty; accepted: prompts of at least one token")
        if not (min(prompt) >= 0 and max(prompt) < info.vocab_size):
            raise UserError(
                f"the prompt has a token id outside 0..{info.vocab_size - 1} (the model's "
                "vocabulary)"
            )
        limits = (self._settings.context, info.max_positions, request.stop.context_limit)
        context = min((limit for limit in limits if limit is not None), default=None)
        if context is not None and len(prompt) > context:
            raise UserError(
                f"the prompt has {len(prompt)} tokens; the maximum is {context} (the context)"
            )
        return replace(request, stop=replace(request.stop, context_limit=context))

    def counters(self) -> Counters:
        with self._changed:
            return replace(self._counters, accepted_at=list(self._counters.accepted_at))

    def drain(self, seconds: float) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._abandons = True
            self._wake()
            self._thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _count_waiting(self) -> None:
        self._counters.waiting = len(self._waiting)
        self._counters.waiting_tokens = sum(len(job.request.prompt) for job in self._waiting)

    # -- the decoding thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._engine.stepping(self._settings.method) as (decoder, step):
                self._batch = self._new_batch(decoder, step)
                self._ready.set()
                self._serve(decoder, step)
        except BaseException as error:
            if self._ready.is_set():
                log.exception("the decoding thread ended")
            self._refused = error
        finally:
            self._ready.set()
            with self._changed:
                self._stopping = True
            for job in [*self._running.values(), *self._waiting]:
                job.tell(Failed(Stopping("the server is shutting down")))

    def _new_batch(self, decoder: Decoder, step: Step) -> Batch:
        batch = Batch(
            decoder,
            step,
            self._settings.parallel,
            SamplingSettings(),
            StopSettings(),
            keep_bytes=self._settings.prefix_memory,
        )
        batch.session.on_emitted = self._emitted
        batch.session.sampler.isolates = True
        return batch

    def _serve(self, decoder: Decoder, step: Step) -> None:
        while self._wait():
            try:
                self._drop_cancelled()
                self._admit()
                self._read()
                if self._batch.session.active:
                    self._batch.advance()
                self._finish()
            except Exception as error:
                self._give_up(error, decoder, step)
            self._count()
        self._batch.close()

    def _wait(self) -> bool:
        """Until there is work; False: there will be none."""
        idle = False
        with self._changed:
            while not (self._running or self._waiting or self._stopping):
                idle = True
                self._changed.wait()
            if idle:
                self._batch.step.interrupted()
            return not self._abandons and bool(self._running or self._waiting)

    def _drop_cancelled(self) -> None:
        with self._changed:
            if any(job.cancelled for job in self._waiting):
                self._waiting = deque(job for job in self._waiting if not job.cancelled)
                self._count_waiting()
        for seq, job in list(self._running.items()):
            if job.cancelled:
                self._leave(seq)

    def _admit(self) -> None:
        """Waiting requests take free places, the first ones first."""
        while self._batch.free:
            with self._changed:
                if not self._waiting:
                    return
                request = self._waiting[0].request
                if self._is_being_read(request.prompt) or not self._fits(request):
                    return
                job = self._waiting.popleft()
                self._count_waiting()
            try:
                self._join(job)
            except UserError as error:
                job.tell(Failed(error))
            except Exception as error:
                job.tell(Failed(error))
                raise

    def _fits(self, request: Request) -> bool:
        """Whether there is memory for its K/V and the others', however long the answers become."""
        if not self._running:
            return True
        tokens = sum(map(_most_tokens, [request, *(job.request for job in self._running.values())]))
        return tokens * self._batch.token_bytes <= self._memory

    def _is_being_read(self, prompt: Sequence[int]) -> bool:
        """Whether another prompt is being read that begins with the same tokens, which this one can
        share then.
        """
        kept = self._batch.kept
        if kept is None:
            return False
        known = kept.shared(prompt) + _MOST_SHARED
        return any(
            _in_common(one.joining.prompt, prompt) > known for one in self._batch.reading.values()
        )

    def _join(self, job: Job) -> None:
        request = job.request
        most = 0 if not request.speculate else request.most_drafted
        seq, job.cached = self._batch.join(
            Joining(
                request.prompt,
                request.number,
                request.sampling,
                request.stop,
                self._observer(job),
                self._prompt_observer(job),
                most,
                request.prediction,
            )
        )
        job.joined = time.perf_counter()
        self._running[seq] = job
        self._count_running()

    def _observer(self, job: Job) -> Callable[[Tensor, int], None] | None:
        top = job.request.logprobs
        if top is None:
            return None
        return lambda logits, token: job.logprobs.append(of_token(logits, token, top))

    def _prompt_observer(self, job: Job) -> Callable[[int, Tensor], None] | None:
        if not job.request.prompt_logprobs:
            return None
        prompt, top = job.request.prompt, job.request.logprobs or 0
        decoder = self._batch.decoder

        def read(first: int, hidden: Tensor) -> None:
            following = prompt[first + 1 : first + 1 + len(hidden)]
            job.prompt_logprobs += of_prompt(decoder, hidden, following, top)

        return read

    def _read(self) -> None:
        """A piece of the prompts that are being read, as long as others can wait for it."""
        if not self._batch.reading:
            return
        rows = self._pace.rows(bool(self._batch.session.active))
        before = {seq: one.at for seq, one in self._batch.reading.items()}
        begin = time.perf_counter()
        self._batch.read(rows)
        reading = self._batch.reading
        count = sum(
            (reading[seq].at if seq in reading else len(self._running[seq].request.prompt)) - at
            for seq, at in before.items()
        )
        self._pace.took(count, time.perf_counter() - begin)
        for seq in before:
            if seq not in reading and not self._running[seq].first:
                self._told_read(self._running[seq])

    def _told_read(self, job: Job) -> None:
        """Tells that a prompt has been read, once, before its first token."""
        job.first = time.perf_counter()
        job.tell(PromptRead(job.cached, tuple(job.prompt_logprobs[: len(job.request.prompt)])))
        with self._changed:
            self._counters.prompt_tokens += len(job.request.prompt)
            self._counters.cached_tokens += job.cached

    def _emitted(self, seq: int, tokens: list[int], origins: Sequence[Origin]) -> None:
        job = self._running[seq]
        if not job.first:
            self._told_read(job)
        logprobs, job.logprobs = job.logprobs[: len(tokens)], []
        job.tell(Emitted(tuple(tokens), tuple(origins), tuple(logprobs)))

    def _finish(self) -> None:
        """Requests that have ended leave; so do those whose processors raised an error."""
        for seq in self._batch.ended:
            job = self._running[seq]
            error = self._batch.session.sampler.failed.get(seq)
            if error is None:
                self._end(seq, job)
            else:
                job.tell(Failed(error))
            self._leave(seq)
        for seq, error in list(self._batch.session.sampler.failed.items()):
            if seq in self._running:
                self._running[seq].tell(Failed(error))
                self._leave(seq)

    def _end(self, seq: int, job: Job) -> None:
        if not job.first:  # it has no token
            self._told_read(job)
        now, session = time.perf_counter(), self._batch.session
        reason, stats = session.stops.reasons[seq], session.each[seq]
        assert reason is not None
        usage = Usage(
            prompt_tokens=len(job.request.prompt),
            cached_tokens=job.cached,
            new_tokens=stats.tokens,
            steps=stats.sequence_steps,
            drafted=stats.drafted,
            accepted=stats.accepted,
            queue_seconds=job.joined - job.submitted,
            prefill_seconds=job.first - job.joined,
            decode_seconds=now - job.first,
        )
        job.tell(Finished(reason, usage))
        with self._changed:
            self._counters.finished += 1
            self._counters.request_seconds += now - job.joined

    def _leave(self, seq: int) -> None:
        self._batch.session.sampler.failed.pop(seq, None)
        self._batch.leave(seq)
        del self._running[seq]
        self._count_running()

    def _give_up(self, error: Exception, decoder: Decoder, step: Step) -> None:
        """A step failed: its requests end, and others go on with a new batch."""
        log.exception("a step failed; its %d requests end", len(self._running))
        self._count()
        self._before = self.counters()
        for job in self._running.values():
            job.tell(Failed(error))
        self._running = {}
        self._count_running()
        self._batch = self._new_batch(decoder, step)

    def _count_running(self) -> None:
        with self._changed:
            self._counters.running = len(self._running)

    def _count(self) -> None:
        stats, before, batch = self._batch.session.stats, self._before, self._batch
        both = before.accepted_at, stats.accepted_at
        with self._changed:
            counters = self._counters
            counters.new_tokens = before.new_tokens + stats.tokens
            counters.steps = before.steps + stats.sequence_steps
            counters.drafts = before.drafts + (stats.tried_at[0] if stats.tried_at else 0)
            counters.drafted = before.drafted + stats.drafted
            counters.accepted = before.accepted + stats.accepted
            counters.accepted_at = [
                sum(counts[place] for counts in both if place < len(counts))
                for place in range(max(map(len, both)))
            ]
            counters.kept_bytes = 0 if batch.kept is None else batch.kept.nbytes


def _most_tokens(request: Request) -> int:
    """Of prompt and answer."""
    stop, prompt = request.stop, len(request.prompt)
    most = [prompt + stop.max_new_tokens] if stop.max_new_tokens is not None else []
    if stop.context_limit is not None:
        most.append(stop.context_limit)
    return min(most, default=prompt)


def _in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    count = min(len(one), len(other))
    return next((n for n in range(count) if one[n] != other[n]), count)
