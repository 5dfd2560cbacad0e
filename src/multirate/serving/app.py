"""The HTTP application: its routes, and what they have in common."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, TypeVar

import anyio
from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from multirate.serving import errors
from multirate.serving.answers import Answers, Update
from multirate.serving.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ResponsesBody,
    TokenizeBody,
)
from multirate.serving.chat import ChatReply
from multirate.serving.completions import CompletionReply
from multirate.serving.conversation import encode
from multirate.serving.errors import ApiError, api_error
from multirate.serving.limits import Buffered, parsed, read_body
from multirate.serving.logs import Record, log
from multirate.serving.metrics import Metrics
from multirate.serving.middleware import KeyChecked, Logged, cors
from multirate.serving.model import ServedModel
from multirate.serving.page import add_page
from multirate.serving.replies import Reply
from multirate.serving.requests import Scheduler
from multirate.serving.responses import ResponseReply
from multirate.serving.settings import HttpSettings
from multirate.serving.sse import EventStream, until_gone

B = TypeVar("B", bound=Body)
R = TypeVar("R")
TOKENISING = 2
"""How many bodies are tokenised at a time, beside the decoding thread."""


class Service:
    """A model, who decodes it, and what is counted."""

    def __init__(self, model: ServedModel, scheduler: Scheduler, settings: HttpSettings) -> None:
        self.model = model
        self.scheduler = scheduler
        self.settings = settings
        self.metrics = Metrics(scheduler, model.name)
        self._buffered = Buffered(settings.max_bodies)
        self._tokenising = anyio.CapacityLimiter(TOKENISING)

    async def body(self, request: Request, kind: type[B]) -> B:
        """A request's body, checked. Raises ApiError for a wrong one."""
        record: Record = request.scope["state"]["record"]
        async with read_body(request, self.settings, self._buffered) as data:
            record.started = time.perf_counter()
            body = await self.aside(request, partial(parsed, kind, data))
        self.model.check_name(body.model)
        record.model = self.model.name
        return body

    async def aside(self, request: Request, work: Callable[[], R]) -> R:
        """The result of `work`, done in a thread, so that nobody's stream waits for it."""
        run = run_sync(work, abandon_on_cancel=True, limiter=self._tokenising)
        return await until_gone(request.receive, run)

    async def generate(
        self,
        request: Request,
        kind: type[ChatBody] | type[CompletionBody] | type[ResponsesBody],
        translate: Callable[[Any, ServedModel, HttpSettings], Reply],
    ) -> Response:
        """The answer to a request, whole or as a stream."""
        self.scheduler.check_room(1)  # before its body is read, too
        body = await self.body(request, kind)
        record: Record = request.scope["state"]["record"]
        record.answers = body.answers
        if body.answers > self.settings.max_answers:
            raise ApiError(
                f"the request asks for {body.answers} answers; accepted: "
                f"{self.settings.max_answers}, counting all prompts",
                "n",
            )
        self.scheduler.check_room(body.answers)
        reply = await self.aside(request, partial(translate, body, self.model, self.settings))
        if self.settings.log_prompts:
            record.texts["prompts"] = repr(
                [self._prompt(one.request.prompt) for one in reply.choices]
            )
        answers = Answers(self.scheduler, reply.choices, self.metrics, record.started)
        answers.submit()
        streams = False
        try:
            if body.stream:
                # Before any byte is sent, so that an early failure still has a status of its own.
                first = await until_gone(request.receive, _first(answers))
                streams = True
                close = partial(self._close, answers, reply, record)
                return EventStream(self._stream(answers, reply, first, record), close)
            await until_gone(request.receive, _all(answers))
            return JSONResponse(reply.whole())
        finally:
            if not streams:
                self._close(answers, reply, record)

    async def _stream(
        self, answers: Answers, reply: Reply, first: list[Update], record: Record
    ) -> AsyncIterator[bytes]:
        for event in reply.opening():
            yield event
        for update in first:
            for event in reply.events(update):
                yield event
        try:
            while (following := await answers.next()) is not None:
                for event in reply.events(following):
                    yield event
        except Exception as error:
            record.error = api_error(error)
            if record.error.status >= 500:
                log.error("unexpected", exc_info=error, extra={"fields": {"id": record.id}})
            answers.close()
            for event in reply.failing(record.error):
                yield event
            return
        for event in reply.closing():
            yield event

    def _close(self, answers: Answers, reply: Reply, record: Record) -> None:
        answers.close()
        record.usage = reply.total()
        record.finish = ",".join(sorted({one.finish or "abort" for one in reply.choices}))
        if self.settings.log_prompts:
            record.texts["answers"] = repr([one.said for one in reply.choices])

    def _prompt(self, ids: Any) -> str:
        return self.model.decode(ids, skip_special=False)


async def _first(answers: Answers) -> list[Update]:
    """What happens up to the first token."""
    found: list[Update] = []
    while (update := await answers.next()) is not None:
        found.append(update)
        if update.read is None:
            break
    return found


async def _all(answers: Answers) -> None:
    while await answers.next() is not None:
        pass


def make_app(model: ServedModel, scheduler: Scheduler, settings: HttpSettings) -> FastAPI:
    """The application. `app.state.service` has what its routes use."""
    app = FastAPI(openapi_url=None)  # its pages would load scripts from elsewhere
    service = app.state.service = Service(model, scheduler, settings)
    errors.install(app)
    if settings.api_key is not None:
        app.add_middleware(KeyChecked, key=settings.api_key)
    if settings.cors_origins:
        app.add_middleware(CORSMiddleware, **cors(settings))
    app.add_middleware(Logged, settings=settings)
    _add_generating(app, service)
    _add_models(app, service)
    _add_tokenising(app, service)
    _add_monitoring(app, service)
    add_page(app, model, settings)
    return app


def _add_generating(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await service.generate(request, ChatBody, ChatReply)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await service.generate(request, CompletionBody, CompletionReply)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await service.generate(request, ResponsesBody, ResponseReply)


def _add_models(app: FastAPI, service: Service) -> None:
    model = service.model
    card = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "multirate",
        "max_model_len": model.context,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def one(name: str) -> dict[str, Any]:
        model.check_name(name)
        return card


def _add_tokenising(app: FastAPI, service: Service) -> None:
    model = service.model

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await service.body(request, TokenizeBody)
        if (body.prompt is None) == (not body.messages):
            raise ApiError("give either prompt or messages", "prompt")

        def work() -> list[int]:
            if body.messages:
                return encode(model, body.messages)
            return model.encode(body.prompt or "", body.add_special_tokens)

        tokens = await service.aside(request, work)
        return {"count": len(tokens), "max_model_len": model.context, "tokens": tokens}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        body = await service.body(request, DetokenizeBody)
        model.check_ids(body.tokens, "tokens")
        decode = partial(model.decode, body.tokens, body.skip_special_tokens)
        return {"prompt": await service.aside(request, decode)}


def _add_monitoring(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        service.scheduler.check_room(0)  # raises Stopping
        return {"status": "ready"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)
