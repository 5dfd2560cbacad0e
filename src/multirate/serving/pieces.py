"""How often a stream gets a message: the tokens of steps that end within PIECE_SECONDS go together.

Messages take time of the processors that decode: with one for each step SmolLM2 writes a tenth
fewer tokens (lab/notes/serving.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from multirate.serving.requests import Deliver, Emitted, Event

PIECE_SECONDS = 0.04
"""25 messages a second look as smooth as more."""


def in_pieces(deliver: Deliver, clock: Callable[[], float] = time.perf_counter) -> Deliver:
    """Delivers the first tokens at once and later ones at most every PIECE_SECONDS; what ends an
    answer, at once, after all tokens. For one request, on the decoding thread.
    """
    waiting: list[Emitted] = []
    latest = float("-inf")

    def deliver_in_pieces(event: Event) -> None:
        nonlocal latest
        if isinstance(event, Emitted):
            waiting.append(event)
            now = clock()
            if now - latest < PIECE_SECONDS:
                return
            latest = now
        if waiting:
            deliver(_joined(waiting))
            waiting.clear()
        if not isinstance(event, Emitted):
            deliver(event)

    return deliver_in_pieces


def _joined(steps: list[Emitted]) -> Emitted:
    """The tokens of several steps as one step's."""
    if len(steps) == 1:
        return steps[0]
    return Emitted(
        tuple(token for step in steps for token in step.tokens),
        tuple(origin for step in steps for origin in step.origins),
        tuple(logprob for step in steps for logprob in step.logprobs),
    )
