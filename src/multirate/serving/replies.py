"""What the endpoints that generate have in common."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from multirate import __version__
from multirate.serving import sse
from multirate.serving.answers import Choice, Update
from multirate.serving.errors import ApiError
from multirate.serving.model import ServedModel
from multirate.serving.requests import TokenLogprob, Usage

LEAST_LOGPROB = -9999.0
"""JSON has no −inf."""


class Reply(ABC):
    """A translated body: what is to be decoded, and how its answer is written."""

    def __init__(self, prefix: str, model: ServedModel, choices: Sequence[Choice]) -> None:
        self.id = f"{prefix}{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.choices = choices

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The finished answer."""

    def opening(self) -> list[bytes]:
        """The events that a stream begins with."""
        return []

    @abstractmethod
    def events(self, update: Update) -> list[bytes]:
        """The events of an update."""

    @abstractmethod
    def closing(self) -> list[bytes]:
        """The events that a complete stream ends with."""

    def failing(self, error: ApiError) -> list[bytes]:
        """The events that a stream ends with after an error."""
        return [sse.data(error.body())]

    def head(self, kind: str) -> dict[str, Any]:
        """What the bodies of completions and chats begin with."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": f"multirate-{__version__}",
        }

    def total(self) -> Usage:
        """Counts of all finished answers. A prompt counts once, however many answers it has."""
        found = [one.usage for one in self.choices if one.usage is not None]
        firsts = [
            one.usage for one in self.choices if one.usage is not None and not one.request.number
        ]
        return Usage(
            prompt_tokens=sum(one.prompt_tokens for one in firsts),
            cached_tokens=sum(one.cached_tokens for one in firsts),
            new_tokens=sum(one.new_tokens for one in found),
            steps=sum(one.steps for one in found),
            drafted=sum(one.drafted for one in found),
            accepted=sum(one.accepted for one in found),
            queue_seconds=max((one.queue_seconds for one in found), default=0.0),
            prefill_seconds=sum(one.prefill_seconds for one in firsts),
            decode_seconds=sum(one.decode_seconds for one in found),
        )


def usage_of(used: Usage) -> dict[str, Any]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.new_tokens,
        "total_tokens": used.prompt_tokens + used.new_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": used.accepted,
            "rejected_prediction_tokens": used.drafted - used.accepted,
        },
    }


def timings_of(used: Usage) -> dict[str, Any]:
    """llama.cpp's `timings`, in milliseconds and tokens per second."""
    read = used.prompt_tokens - used.cached_tokens
    found: dict[str, Any] = {"cache_n": used.cached_tokens}
    for name, count, seconds in (
        ("prompt", read, used.prefill_seconds),
        ("predicted", used.new_tokens, used.decode_seconds),
    ):
        found |= {
            f"{name}_n": count,
            f"{name}_ms": 1000 * seconds,
            f"{name}_per_token_ms": 1000 * seconds / count if count else 0.0,
            f"{name}_per_second": count / seconds if seconds else 0.0,
        }
    return found | {"draft_n": used.drafted, "draft_n_accepted": used.accepted}


def chat_logprobs(
    model: ServedModel, tokens: Sequence[int], found: Sequence[TokenLogprob]
) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, octets = model.token_text(token), model.token_bytes(token)
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": octets}

    content = [
        entry(token, one.logprob) | {"top_logprobs": [entry(*other) for other in one.top]}
        for token, one in zip(tokens, found, strict=True)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    model: ServedModel,
    tokens: Sequence[int],
    found: Sequence[TokenLogprob | None],
    begin: int = 0,
) -> dict[str, Any]:
    """`logprobs` of a completion's choice. begin: where the first token's text begins."""
    texts, offsets = [model.token_text(token) for token in tokens], []
    for text in texts:
        offsets.append(begin)
        begin += len(text)
    values = [None if one is None else max(one.logprob, LEAST_LOGPROB) for one in found]
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": [
            None if one is None else _top(model, text, one)
            for text, one in zip(texts, found, strict=True)
        ],
        "text_offset": offsets,
    }


def _top(model: ServedModel, text: str, found: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens, and the one at the place. Of several with the same text the likeliest
    counts.
    """
    top: dict[str, float] = {}
    for token, logprob in found.top:
        top.setdefault(model.token_text(token), max(logprob, LEAST_LOGPROB))
    top.setdefault(text, max(found.logprob, LEAST_LOGPROB))
    return top
