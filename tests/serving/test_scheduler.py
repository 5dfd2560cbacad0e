"""The decoding thread: texts under load, refusals, cancellation, failures, and the end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from native_kernel import skip_without_kernel

import multirate
from multirate.decoding.batch import Batch
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.prefill import score
from multirate.decoding.stopping import StopSettings
from multirate.engine import Engine
from multirate.errors import UserError
from multirate.runtime.decoder import Decoder
from multirate.runtime.load import load_decoder
from multirate.serving import scheduler as scheduling
from multirate.serving.requests import (
    Busy,
    Emitted,
    Event,
    Failed,
    Finished,
    PromptRead,
    Request,
    Stopping,
    Ticket,
)
from multirate.serving.scheduler import BatchScheduler
from multirate.serving.settings import ServingSettings


@cache
def engine() -> Engine:
    skip_without_kernel()
    made = multirate.attach("tiny", backend="native")
    made.add("m2r2-carry")
    return made


@contextmanager
def serving(**settings: Any) -> Iterator[BatchScheduler]:
    made = scheduling.start(engine(), ServingSettings(**settings))
    try:
        yield made
    finally:
        made.drain(0)


class Heard:
    """The events of a request. hold: the decoding thread waits in the first of them until then."""

    def __init__(self, hold: threading.Event | None = None) -> None:
        self.events: list[Event] = []
        self.over, self.begun, self._hold = threading.Event(), threading.Event(), hold

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self.begun.set()
        if self._hold is not None:
            assert self._hold.wait(60)
        if isinstance(event, Finished | Failed):
            self.over.set()

    def wait(self) -> Heard:
        assert self.over.wait(60)
        return self

    @property
    def tokens(self) -> list[int]:
        return [t for event in self.events if isinstance(event, Emitted) for t in event.tokens]

    @property
    def last(self) -> Event:
        return self.events[-1]


def request(prompt: list[int], length: int = 20, **options: Any) -> Request:
    options = {"sampling": SamplingSettings(), **options}
    return Request(prompt, stop=StopSettings(length), **options)


@cache
def another_decoder() -> Decoder:
    """A decoder does one call at a time, and the server's may be at work."""
    return load_decoder(engine().model, "native")


def alone(asked: Request) -> list[int]:
    return generate(
        another_decoder(), PlainStep(), [asked.prompt], asked.sampling, asked.stop
    ).sequences[0]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_hundreds_of_mixed_requests_give_their_own_texts() -> None:
    rng = random.Random(0)
    vocab = engine().decoder.info.vocab_size
    common = [rng.randrange(3, vocab) for _ in range(40)]
    asked = []
    for _ in range(200):
        prompt = [*common[: rng.randrange(40)], *(rng.randrange(3, vocab) for _ in range(5))]
        sampling = rng.choice(
            [
                SamplingSettings(),
                SamplingSettings(1.0, seed=rng.randrange(9)),
                SamplingSettings(0.8, top_p=0.9, seed=1),
                SamplingSettings(repetition_penalty=1.2),
            ]
        )
        asked.append(
            request(
                prompt,
                rng.choice([1, 3, 25]),
                sampling=sampling,
                speculate=rng.random() < 0.8,
                most_drafted=rng.choice([None, 1, 4]),
                logprobs=rng.choice([None, None, 2]),
            )
        )
    heard = [Heard() for _ in asked]
    cancelled = set()
    with serving(parallel=6, max_queue=200, prefix_memory=1 << 20) as server:
        for number, one in enumerate(asked):
            ticket = server.submit(one, heard[number])
            if rng.random() < 0.2:
                ticket.cancel()
                cancelled.add(number)
        for number, one in enumerate(heard):
            if number not in cancelled:
                one.wait()
        until(lambda: not (server.counters().running or server.counters().waiting))
        counts = server.counters()
    for number, (one, said) in enumerate(zip(asked, heard, strict=True)):
        text = alone(one)
        if number in cancelled:
            assert said.tokens == text[: len(said.tokens)]
            continue
        assert said.tokens == text, one
        assert isinstance(said.events[0], PromptRead) and isinstance(said.last, Finished)
        usage = said.last.usage
        assert usage.prompt_tokens == len(one.prompt) and usage.new_tokens == len(text)
        assert usage.cached_tokens == said.events[0].cached < len(one.prompt)
        origins = [o for e in said.events if isinstance(e, Emitted) for o in e.origins]
        assert usage.accepted == sum(origin != "model" for origin in origins) <= usage.drafted
        assert usage.new_tokens == usage.accepted + usage.steps + 1
        if not one.speculate:
            assert usage.drafted == 0
        shown = [p for e in said.events if isinstance(e, Emitted) for p in e.logprobs]
        assert len(shown) == (len(text) if one.logprobs is not None else 0)
        for token, logprob in zip(text, shown, strict=False):
            assert len(logprob.top) == 2 and logprob.logprob <= logprob.top[0][1] <= 0
            if one.sampling == SamplingSettings():
                assert logprob.top[0] == (token, logprob.logprob)
    assert counts.accepted == sum(counts.accepted_at) > 0
    assert counts.cached_tokens > 0 and 0 < counts.kept_bytes <= 1 << 20
    assert counts.new_tokens >= sum(len(one.tokens) for one in heard)


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    gate = threading.Event()
    with serving(parallel=1, max_queue=2, max_queue_tokens=10) as server:
        first = Heard(gate)
        server.submit(request([5]), first)
        assert first.begun.wait(60)
        server.check_room(2)
        with pytest.raises(Busy):
            server.check_room(3)
        waiting = Heard()
        server.submit(request([5] * 30), waiting)  # one may always wait
        with pytest.raises(Busy, match="prompt tokens") as tokens:
            server.submit(request([5] * 2), Heard())
        assert 1 <= tokens.value.retry_after <= 60
        assert server.counters().waiting == 1 and server.counters().waiting_tokens == 30
        gate.set()
        assert waiting.wait().tokens == alone(request([5] * 30))
        until(lambda: server.counters().running == 0)
        many = [Heard() for _ in range(3)]
        for one in many:
            server.submit(request([6]), one)
        assert all(one.wait().tokens == alone(request([6])) for one in many)


def test_who_has_an_answer_may_ask_again_at_once() -> None:
    refused = list[Exception]()
    with serving(parallel=1, max_queue=0) as server:
        for _ in range(20):
            over = threading.Event()

            def deliver(event: Event, over: threading.Event = over) -> None:
                if isinstance(event, Finished):
                    try:
                        server.check_room(1)
                    except Busy as error:
                        refused.append(error)
                    over.set()

            server.submit(request([5], 3), deliver)
            assert over.wait(60)
    assert not refused


def test_requests_wait_for_the_memory_of_their_longest_answers() -> None:
    with serving(parallel=4) as server:
        token = server._batch.token_bytes
    long = request([5], 20)  # 21 tokens
    for memory, together in ((1, 1), (42 * token, 2), (63 * token - 1, 2), (84 * token, 4)):
        gates = threading.Event(), threading.Event()
        first, second, others = Heard(gates[0]), Heard(gates[1]), [Heard() for _ in range(3)]
        with serving(parallel=4, kv_memory=memory) as server:
            server.submit(request([6], 1), first)
            assert first.begun.wait(60)
            for heard in (second, *others):
                server.submit(long, heard)
            gates[0].set()
            assert second.begun.wait(60)  # the first one has left, and all that fit have joined
            assert server.counters().running == together
            gates[1].set()
            assert all(one.wait().tokens == alone(long) for one in (second, *others))


@pytest.mark.parametrize("when", ["waiting", "decoding"])
def test_a_cancelled_request_says_nothing_more_and_frees_its_place(when: str) -> None:
    gate = threading.Event()
    with serving(parallel=1) as server:
        first = Heard(gate)
        running = server.submit(request([5], 40), first)
        assert first.begun.wait(60)
        second, third = Heard(), Heard()
        queued = server.submit(request([6]), second)
        server.submit(request([7]), third)
        ticket: Ticket = queued if when == "waiting" else running
        ticket.cancel()
        count = len(first.events)
        gate.set()
        assert third.wait().tokens == alone(request([7]))
        if when == "waiting":
            assert not second.events and first.wait().tokens == alone(request([5], 40))
        else:
            assert len(first.events) == count and second.wait().tokens == alone(request([6]))
        until(lambda: server.counters().running == 0)
        ticket.cancel()  # nothing to do any more


def test_prompts_that_cannot_be_used_are_refused_with_a_reason() -> None:
    info = engine().decoder.info
    with serving(context=50) as server:
        for prompt, why in (
            ([], "empty"),
            ([info.vocab_size], "vocabulary"),
            ([-1], "vocabulary"),
            ([5] * 51, "maximum is 50"),
        ):
            with pytest.raises(UserError, match=why):
                server.submit(request(prompt), Heard())
        heard = Heard()
        server.submit(request([5] * 45, 20), heard)
        last = heard.wait().last
        assert isinstance(last, Finished) and last.reason == "context" and len(heard.tokens) == 5


def test_no_tokens_and_the_prompt_s_log_probabilities() -> None:
    prompt = [5, 9, 6, 7, 5]
    with serving() as server:
        heard = Heard()
        asked = request(prompt, 0, prompt_logprobs=True, logprobs=1)
        server.submit(asked, heard)
        read, last = heard.wait().events
        assert isinstance(last, Finished) and last.reason == "length" and not heard.tokens
    assert isinstance(read, PromptRead) and read.logprobs[0] is None
    decoder = another_decoder()
    known, likeliest = score(decoder, prompt[:1], prompt[1:])
    shown = [one for one in read.logprobs if one is not None]
    assert [one.logprob for one in shown] == pytest.approx(known, abs=1e-5)
    assert [one.top[0][0] for one in shown] == likeliest


def test_a_request_whose_processor_fails_ends_alone() -> None:
    def processors(prompt: int) -> list[Any]:
        def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] > prompt + 4:
                raise ValueError("a defect")
            return scores

        return [process]

    with serving() as server:
        bad, good = Heard(), Heard()
        server.submit(request([5], 30, sampling=SamplingSettings(processors=processors)), bad)
        server.submit(request([5], 30), good)
        assert isinstance(bad.wait().last, Failed) and "defect" in str(bad.last.error)
        assert good.wait().tokens == alone(request([5], 30))
        assert bad.tokens == good.tokens[: len(bad.tokens)] and len(bad.tokens) < 10
        until(lambda: server.counters().running == 0)


def test_a_step_that_fails_ends_its_requests_and_no_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fails, advance = threading.Event(), Batch.advance

    def failing(batch: Batch) -> None:
        if fails.is_set():
            fails.clear()
            raise RuntimeError("out of memory")
        advance(batch)

    monkeypatch.setattr(Batch, "advance", failing)
    with serving() as server:
        before = Heard()
        server.submit(request([6]), before)
        before.wait()
        tokens = server.counters().new_tokens
        fails.set()
        bad = Heard()
        server.submit(request([5]), bad)
        assert isinstance(bad.wait().last, Failed)
        good = Heard()
        server.submit(request([5]), good)
        assert good.wait().tokens == alone(request([5]))
        until(lambda: server.counters().running == 0)
        assert server.counters().new_tokens > tokens  # counters never fall


def test_a_listener_that_fails_is_cancelled() -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("a defect of the listener")

    with serving() as server:
        server.submit(request([5], 40), broken)
        good = Heard()
        server.submit(request([5], 40), good)
        assert good.wait().tokens == alone(request([5], 40))
        until(lambda: server.counters().running == 0)


@pytest.mark.parametrize("patient", [True, False])
def test_the_end_waits_for_requests_as_long_as_it_may(patient: bool) -> None:
    gate = threading.Event()
    server = scheduling.start(engine(), ServingSettings(parallel=1))
    first, second = Heard(gate), Heard()
    server.submit(request([5]), first)
    assert first.begun.wait(60)
    server.submit(request([6]), second)
    ending = threading.Thread(target=server.drain, args=(60 if patient else 0.01,))
    ending.start()

    def refused() -> bool:
        try:
            server.check_room(1)
        except Stopping:
            return True
        return False

    until(refused)
    with pytest.raises(Stopping):
        server.submit(request([5]), Heard())
    if not patient:
        time.sleep(0.05)
    gate.set()
    ending.join(60)
    assert not ending.is_alive()
    if patient:
        assert first.tokens == alone(request([5])) and second.tokens == alone(request([6]))
    else:
        assert isinstance(second.last, Failed) and isinstance(second.last.error, Stopping)
    engine().generate([[5]])  # the engine is free again


def test_a_method_that_requests_cannot_share_is_refused_with_those_that_they_can() -> None:
    with pytest.raises(UserError, match=r"accepted: .*sam"):
        scheduling.start(engine(), ServingSettings(method="lookahead"))
    engine().generate([[5]])
