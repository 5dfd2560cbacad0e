"""What the operator of a server may set."""

from __future__ import annotations

from dataclasses import dataclass

from multirate.errors import UserError


@dataclass(frozen=True)
class ServingSettings:
    """How requests are decoded. Raises UserError naming the field, its value and what is
    accepted.
    """

    parallel: int = 16
    """How many requests are decoded at a time."""
    max_queue: int = 64
    """How many requests may wait for a place."""
    max_queue_tokens: int | None = None
    """How many prompt tokens may wait in total. None: no limit but max_queue."""
    context: int | None = None
    """Maximum of a request's prompt and new tokens together. None: the model's own."""
    prefix_memory: int = 512 << 20
    """Bytes of K/V kept for prompts that begin alike. 0 keeps nothing."""
    method: str | None = None
    """The method that drafts. None: the engine's default."""

    def __post_init__(self) -> None:
        for name, least in (("parallel", 1), ("max_queue", 0), ("prefix_memory", 0)):
            _check_least(name, getattr(self, name), least)
        for name in ("max_queue_tokens", "context"):
            if getattr(self, name) is not None:
                _check_least(name, getattr(self, name), 1)


@dataclass(frozen=True)
class HttpSettings:
    """What clients may ask for, and how the server behaves. Raises UserError naming the field, its
    value and what is accepted.
    """

    api_key: str | None = None
    """What clients must send as `Authorization: Bearer KEY`. None: nothing."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins may use the server; "*" admits all."""
    max_tokens: int | None = None
    """The largest max_tokens that a client may ask for, and the default of a chat. None: what the
    context leaves.
    """
    max_body: int = 8 << 20
    """Bytes of a request's body."""
    max_bodies: int = 256 << 20
    """Bytes of all bodies that have not been tokenised yet."""
    max_answers: int = 64
    """Answers of one request: its prompts times its `n`."""
    max_stops: int = 64
    """Stop strings of one request."""
    max_stop_length: int = 1024
    """Characters of a stop string."""
    max_logprobs: int = 20
    """Alternatives reported with each token."""
    max_headers: int = 100
    """Header lines of a request."""
    receive_seconds: float = 30.0
    """How long a client may take to send a request's head, and its body."""
    drain_seconds: float = 30.0
    """How long running requests may take to finish after SIGTERM."""
    log_prompts: bool = False
    """Whether prompts and answers are written to the log."""

    def __post_init__(self) -> None:
        counts = (
            "max_body",
            "max_bodies",
            "max_answers",
            "max_stops",
            "max_stop_length",
            "max_headers",
        )
        for name in counts:
            _check_least(name, getattr(self, name), 1)
        if self.max_tokens is not None:
            _check_least("max_tokens", self.max_tokens, 1)
        _check_least("max_logprobs", self.max_logprobs, 0)
        _check_least("drain_seconds", self.drain_seconds, 0)
        if self.api_key is not None and not self.api_key.strip():
            raise UserError("the API key is empty: give one, or leave it out")


def _check_least(name: str, value: float, least: int) -> None:
    if not value >= least:
        raise UserError(f"{name} is {value!r}; accepted: at least {least}")
