"""/v1/completions: a prompt's continuation."""

from __future__ import annotations

from typing import Any

from multirate.serving import sse
from multirate.serving.answers import Choice, Update
from multirate.serving.bodies import CompletionBody
from multirate.serving.errors import ApiError
from multirate.serving.model import ServedModel
from multirate.serving.parts import Plain, Said
from multirate.serving.replies import Reply, completion_logprobs, timings_of, usage_of
from multirate.serving.requests import Request
from multirate.serving.sampling import (
    Choosing,
    constraint_of,
    drafting,
    most_tokens,
    predicted,
    stop_strings,
    stopping,
)
from multirate.serving.settings import HttpSettings

DEFAULT_TOKENS = 16
"""OpenAI's max_tokens of a completion."""


class CompletionReply(Reply):
    def __init__(self, body: CompletionBody, model: ServedModel, settings: HttpSettings) -> None:
        """Tokenises. Raises ApiError, or UserError, for what cannot be done."""
        _check(body, settings)
        self._texts: list[str] = []
        self._echo = bool(body.echo)
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._begun: dict[int, int] = {}
        super().__init__("cmpl-", model, self._choices(body, model, settings))

    def _choices(
        self, body: CompletionBody, model: ServedModel, settings: HttpSettings
    ) -> list[Choice]:
        strings = stop_strings(body, settings)
        default = (
            DEFAULT_TOKENS
            if settings.max_tokens is None
            else min(DEFAULT_TOKENS, settings.max_tokens)
        )
        asked = default if body.max_tokens is None else body.max_tokens
        stop = stopping(
            model, strings, most_tokens(asked, "max_tokens", settings), bool(body.ignore_eos)
        )
        choosing = Choosing(body, model, constraint_of(body))
        how = drafting(body.speculative, model)
        expected = predicted(body.prediction, model)
        choices: list[Choice] = []
        for prompt in body.prompt:
            ids = model.encode(prompt) if isinstance(prompt, str) else prompt
            model.check_length(ids, "prompt")
            model.check_ids(ids, "prompt")
            if self._echo:
                self._texts.append(prompt if isinstance(prompt, str) else model.decode(ids, False))
            for number in range(body.n or 1):
                request = Request(
                    prompt=ids,
                    sampling=choosing.settings(ids),
                    stop=stop,
                    number=number,
                    prediction=expected,
                    logprobs=body.logprobs,
                    prompt_logprobs=self._echo and body.logprobs is not None,
                    **how,
                )
                texts = stop.stop_strings
                choices.append(Choice(len(choices), request, model, Plain(), texts))
        self._each = body.n or 1
        return choices

    def whole(self) -> dict[str, Any]:
        choices = []
        for choice in self.choices:
            logprobs, prompt = None, choice.request.prompt
            if choice.request.prompt_logprobs:
                ids, found = [*prompt, *choice.tokens], [*choice.read.logprobs, *choice.logprobs]
                logprobs = completion_logprobs(self.model, ids, found)
            elif choice.request.logprobs is not None:
                logprobs = completion_logprobs(self.model, choice.tokens, choice.logprobs)
            text = self._echoed(choice) + choice.said
            choices.append(_choice(choice.index, text, logprobs, choice.finish))
        used = self.total()
        more = {"usage": usage_of(used), "timings": timings_of(used)}
        return self._body(choices) | more

    def events(self, update: Update) -> list[bytes]:
        choice, begin = update.choice, self._begun.get(update.choice.index, 0)
        text = "".join(part.text for part in update.parts if isinstance(part, Said))
        tokens, found = [*update.tokens], [*update.logprobs]
        if update.read is not None:
            text = self._echoed(choice)
            if choice.request.prompt_logprobs:
                tokens, found = [*choice.request.prompt], [*update.read.logprobs]  # type: ignore[list-item]
        if not (text or tokens or update.finish):
            return []
        logprobs = completion_logprobs(self.model, tokens, found, begin) if tokens else None
        if logprobs is not None:
            self._begun[choice.index] = begin + sum(map(len, logprobs["tokens"]))
        chunk = self._body([_choice(choice.index, text, logprobs, update.finish)])
        if update.finish is not None and choice.usage is not None:
            chunk["timings"] = timings_of(choice.usage)
        return [sse.data(chunk)]

    def closing(self) -> list[bytes]:
        usage = [sse.data(self._body([]) | {"usage": usage_of(self.total())})]
        return [*(usage if self._usage else []), sse.DONE]

    def _echoed(self, choice: Choice) -> str:
        return self._texts[choice.index // self._each] if self._echo else ""

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._usage else {}
        return self.head("text_completion") | {"choices": choices} | usage


def _choice(index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _check(body: CompletionBody, settings: HttpSettings) -> None:
    """Raises ApiError for what this server does not do."""
    if body.suffix:
        raise ApiError("suffix is not supported; leave it out", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(f"best_of is {body.best_of}; accepted: n, {body.n or 1}", "best_of")
    if body.logprobs is not None and body.logprobs > settings.max_logprobs:
        most = settings.max_logprobs
        raise ApiError(f"logprobs is {body.logprobs}; accepted: 0 to {most}", "logprobs")
