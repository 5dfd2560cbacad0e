"""The decoding thread: requests wait, join the batch between two steps, and leave it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import psutil
from torch import Tensor

from multirate.decoding.batch import Batch, Joining
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.prefix_cache import in_common
from multirate.decoding.results import Origin
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.engine import Engine
from multirate.errors import UserError
from multirate.runtime.decoder import Decoder
from multirate.serving.logprobs import of_prompt, of_token
from multirate.serving.queue import Queue, Submission
from multirate.serving.reading_pace import ReadingPace
from multirate.serving.requests import (
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
    Usage,
)
from multirate.serving.settings import ServingSettings

log = logging.getLogger(__name__)

_MOST_SHARED = 64
"""A prompt waits for another one that is being read if so many more tokens will be kept then."""


def start(engine: Engine, settings: ServingSettings) -> BatchScheduler:
    """A scheduler whose thread runs. Raises UserError for a method that requests cannot share."""
    return BatchScheduler(engine, settings)


class BatchScheduler(Scheduler):
    """Decodes requests in a Batch. See `start`."""

    def __init__(self, engine: Engine, settings: ServingSettings) -> None:
        self._engine, self._settings = engine, settings
        self._queue = Queue(settings)
        # of the decoding thread
        self._running: dict[int, Submission] = {}  # by sequence
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
        self._queue.check_room(requests)

    def submit(self, request: Request, deliver: Deliver) -> Ticket:
        submission = Submission(self._checked(request), deliver, self._queue.wake)
        self._queue.put(submission)
        return submission

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
        return self._queue.counters()

    def drain(self, seconds: float) -> None:
        self._queue.close()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._queue.close(abandon=True)
            self._thread.join()

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
            self._queue.close(abandon=True)
            for one in [*self._running.values(), *self._queue.clear()]:
                one.tell(Failed(Stopping("the server is shutting down")))

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
        while self._queue.wait(idle=step.interrupted):
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

    def _drop_cancelled(self) -> None:
        self._queue.drop_cancelled()
        for seq, one in list(self._running.items()):
            if one.cancelled:
                self._leave(seq)

    def _admit(self) -> None:
        """Waiting requests take free places, the first ones first."""
        while self._batch.free and (one := self._queue.take(self._may_join)) is not None:
            try:
                self._join(one)
            except UserError as error:
                one.tell(Failed(error))
            except Exception as error:
                one.tell(Failed(error))
                raise

    def _may_join(self, request: Request) -> bool:
        return self._fits(request) and not self._is_being_read(request.prompt)

    def _fits(self, request: Request) -> bool:
        """Whether there is memory for its K/V and the others', however long the answers become."""
        if not self._running:
            return True
        others = (one.request for one in self._running.values())
        tokens = sum(map(_most_tokens, [request, *others]))
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
            in_common(one.joining.prompt, prompt) > known for one in self._batch.reading.values()
        )

    def _join(self, one: Submission) -> None:
        request = one.request
        most = 0 if not request.speculate else request.most_drafted
        seq, one.cached = self._batch.join(
            Joining(
                request.prompt,
                request.number,
                request.sampling,
                request.stop,
                self._observer(one),
                self._prompt_observer(one),
                most,
                request.prediction,
            )
        )
        one.joined = time.perf_counter()
        self._running[seq] = one
        self._count_running()

    def _observer(self, one: Submission) -> Callable[[Tensor, int], None] | None:
        top = one.request.logprobs
        if top is None:
            return None
        return lambda logits, token: one.logprobs.append(of_token(logits, token, top))

    def _prompt_observer(self, one: Submission) -> Callable[[int, Tensor], None] | None:
        if not one.request.prompt_logprobs:
            return None
        prompt, top = one.request.prompt, one.request.logprobs or 0
        decoder = self._batch.decoder

        def read(first: int, hidden: Tensor) -> None:
            following = prompt[first + 1 : first + 1 + len(hidden)]
            one.prompt_logprobs += of_prompt(decoder, hidden, following, top)

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

    def _told_read(self, one: Submission) -> None:
        """Tells that a prompt has been read, once, before its first token."""
        one.first = time.perf_counter()
        one.tell(PromptRead(one.cached, tuple(one.prompt_logprobs[: len(one.request.prompt)])))
        with self._queue.counting() as counters:
            counters.prompt_tokens += len(one.request.prompt)
            counters.cached_tokens += one.cached

    def _emitted(self, seq: int, tokens: list[int], origins: Sequence[Origin]) -> None:
        one = self._running[seq]
        if not one.first:
            self._told_read(one)
        logprobs, one.logprobs = one.logprobs[: len(tokens)], []
        one.tell(Emitted(tuple(tokens), tuple(origins), tuple(logprobs)))

    def _finish(self) -> None:
        """Requests that have ended leave; so do those whose processors raised an error. They are
        told after their places are free, as whoever waits for that may ask again at once.
        """
        failed = self._batch.session.sampler.failed
        for seq in {*self._batch.ended, *failed} & self._running.keys():
            one, error = self._running[seq], failed.get(seq)
            event = self._finished(seq, one) if error is None else Failed(error)
            self._leave(seq)
            one.tell(event)

    def _finished(self, seq: int, one: Submission) -> Finished:
        if not one.first:  # it has no token
            self._told_read(one)
        now, session = time.perf_counter(), self._batch.session
        reason, stats = session.stops.reasons[seq], session.each[seq]
        assert reason is not None
        usage = Usage(
            prompt_tokens=len(one.request.prompt),
            cached_tokens=one.cached,
            new_tokens=stats.tokens,
            steps=stats.sequence_steps,
            drafted=stats.drafted,
            accepted=stats.accepted,
            queue_seconds=one.joined - one.submitted,
            prefill_seconds=one.first - one.joined,
            decode_seconds=now - one.first,
        )
        with self._queue.counting() as counters:
            counters.finished += 1
            counters.request_seconds += now - one.joined
        return Finished(reason, usage)

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
        for one in self._running.values():
            one.tell(Failed(error))
        self._running = {}
        self._count_running()
        self._batch = self._new_batch(decoder, step)

    def _count_running(self) -> None:
        with self._queue.counting() as counters:
            counters.running = len(self._running)

    def _count(self) -> None:
        stats, before, batch = self._batch.session.stats, self._before, self._batch
        both = before.accepted_at, stats.accepted_at
        with self._queue.counting() as counters:
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
