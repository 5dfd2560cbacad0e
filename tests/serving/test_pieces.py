"""Tokens of steps that follow each other quickly go out in one message."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from multirate.decoding.results import Origin
from multirate.serving.pieces import PIECE_SECONDS, in_pieces
from multirate.serving.requests import (
    Emitted,
    Event,
    Failed,
    Finished,
    PromptRead,
    TokenLogprob,
    Usage,
)


def emitted(*tokens: int) -> Emitted:
    """Drafted tokens and one of the model's, with a log-probability for each."""
    drafted: list[Origin] = ["draft"] * (len(tokens) - 1)
    return Emitted(tokens, (*drafted, "model"), tuple(TokenLogprob(-token / 2) for token in tokens))


def pieces(*events: tuple[float, Event]) -> list[tuple[float, Event]]:
    """What is delivered, and when, of events at these seconds."""
    found: list[tuple[float, Event]] = []
    now = 0.0
    deliver = in_pieces(lambda event: found.append((now, event)), clock=lambda: now)
    for now, event in events:  # noqa: B007 - the clock reads it
        deliver(event)
    return found


END = Finished("eos", Usage())


def test_the_first_tokens_go_out_at_once_and_later_ones_together() -> None:
    short = PIECE_SECONDS / 4
    found = pieces(
        (5.0, PromptRead(0)),
        (5.0, emitted(1)),
        (5.0 + short, emitted(2, 3)),
        (5.0 + 2 * short, emitted(4)),
        (5.0 + 5 * short, emitted(5)),
        (5.0 + 6 * short, emitted(6)),
        (5.0 + 7 * short, END),
    )
    together = Emitted(
        (2, 3, 4, 5),
        ("draft", "model", "model", "model"),
        tuple(TokenLogprob(-token / 2) for token in (2, 3, 4, 5)),
    )
    assert found == [
        (5.0, PromptRead(0)),
        (5.0, emitted(1)),
        (5.0 + 5 * short, together),
        (5.0 + 7 * short, emitted(6)),
        (5.0 + 7 * short, END),
    ]


def test_slow_steps_are_messages_of_their_own() -> None:
    events = [(0.1 * n, emitted(n)) for n in range(5)]
    assert pieces(*events) == events


def test_a_failure_comes_after_the_tokens_before_it() -> None:
    failed = Failed(ValueError("x"))
    assert pieces((0.0, emitted(1)), (0.01, emitted(2)), (0.01, failed))[1:] == [
        (0.01, emitted(2)),
        (0.01, failed),
    ]


@given(st.lists(st.tuples(st.floats(0, 0.1), st.integers(1, 4)), max_size=30))
def test_no_token_is_lost_or_moved(steps: list[tuple[float, int]]) -> None:
    now, token, events = 0.0, 0, []
    for pause, count in steps:
        now, token = now + pause, token + count
        events.append((now, emitted(*range(token - count, token))))
    found = pieces(*events, (now, END))
    kept = [event for _, event in found if isinstance(event, Emitted)]
    assert [one for event in kept for one in event.tokens] == list(range(token))
    assert all(len(event.tokens) == len(event.origins) == len(event.logprobs) for event in kept)
    assert found[-1] == (now, END)
    times = [at for at, event in found[:-1] if isinstance(event, Emitted)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert all(gap >= PIECE_SECONDS for gap in gaps[:-1])
