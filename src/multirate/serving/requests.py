"""What the HTTP side asks of the thread that decodes, and what comes back: the contract between
the two. Nothing here knows HTTP, and nothing knows the decoder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.results import FinishReason, Origin
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError


@dataclass(frozen=True)
class Request:
    """One prompt to continue."""

    prompt: Sequence[int]
    sampling: SamplingSettings
    stop: StopSettings
    number: int = 0
    """Which of several answers to one prompt this is: it selects the random numbers of the seed."""
    speculate: bool = True
    """Whether drafts may be used at all."""
    most_drafted: int | None = None
    """Maximum number of drafted tokens per step; None: the method's own."""
    prediction: Sequence[int] = ()
    """Tokens that the answer is likely to repeat: drafts are copied from them as well."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report with each emitted token; None: no
    log-probabilities at all.
    """
    prompt_logprobs: bool = False
    """Whether to report the log-probabilities of the prompt's tokens as well."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability, in nats, by the model's own logits before any sampling setting."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens at its place and their log-probabilities, the likeliest first."""


@dataclass(frozen=True)
class PromptRead:
    """The prompt has been read. `cached` of its tokens did not have to be read again."""

    cached: int
    logprobs: tuple[TokenLogprob | None, ...] = ()
    """With `prompt_logprobs`: of every prompt token; None for the first."""


@dataclass(frozen=True)
class Emitted:
    """New tokens, one step's."""

    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """With `logprobs`: of each token."""


@dataclass(frozen=True)
class Usage:
    """Counts and seconds of a finished request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    """Drafted tokens that were verified."""
    accepted: int = 0
    """Drafted tokens that were emitted."""
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    """From the first token to the last."""


@dataclass(frozen=True)
class Finished:
    """The last event of a request that ended by itself."""

    reason: FinishReason
    usage: Usage


@dataclass(frozen=True)
class Failed:
    """The last event of a request that could not be continued. No other request is affected."""

    error: Exception
    """A UserError if the request caused it."""


Event = PromptRead | Emitted | Finished | Failed
Deliver = Callable[[Event], None]
"""Called on the decoding thread, in order. It must return at once and must not raise."""


class Busy(UserError):
    """The queue is full."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds after which a place is likely to be free."""


class Stopping(UserError):
    """The server is shutting down and takes no more requests."""


@dataclass
class Counters:
    """What has happened since the start; only ever grows, but for running and waiting."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    """Steps of sequences: a pass of three sequences counts three."""
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    """By a token's place in its draft, from 0: how many were accepted there."""
    finished: int = 0
    request_seconds: float = 0.0
    """Of finished requests, from a place in the batch to the end."""
    kept_bytes: int = 0
    """K/V kept for prompts to come."""


class Ticket(ABC):
    """A submitted request."""

    @abstractmethod
    def cancel(self) -> None:
        """From any thread. The request ends within a step, and no event follows `cancel`'s return
        except ones that are already under way. Does nothing to a request that has ended.
        """


class Scheduler(ABC):
    """Decodes any number of requests at a time, on a thread of its own. All methods may be called
    from any thread and return at once.
    """

    @abstractmethod
    def check_room(self, requests: int) -> None:
        """Raises Busy if that many more requests do not fit in the queue, Stopping if none is
        taken any more: a cheap test before a prompt is tokenised.
        """

    @abstractmethod
    def submit(self, request: Request, deliver: Deliver) -> Ticket:
        """Queues a request. Raises Busy, Stopping, or UserError for a prompt that cannot be used
        (empty, a token id outside the vocabulary, longer than the context).
        """

    @abstractmethod
    def counters(self) -> Counters:
        """A copy."""

    @abstractmethod
    def drain(self, seconds: float) -> None:
        """Takes no more requests, waits up to so long for those it has, and stops. (This one
        waits.) A request that has not ended by then gets Failed with Stopping.
        """
