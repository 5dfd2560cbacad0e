"""Continuous batching: when a sequence ends, the next prompt takes its place at once.

`generate` answers a batch as a whole, so every answer waits for the longest. Here the batch keeps
its size as long as there are prompts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from multirate.decoding.batch import Batch, Joining
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.plain import PlainStep
from multirate.decoding.prefill import PREFILL_ROWS
from multirate.decoding.results import FinishReason
from multirate.decoding.stopping import StopSettings
from multirate.runtime.decoder import Decoder
from multirate.torch_modes import own_modes

REFILL_SHARE = 16
"""The batch is refilled once a sixteenth of its places is free, because a prefill of several
prompts costs little more than one of a single prompt.
"""


@dataclass(frozen=True)
class Finished:
    """One answer."""

    number: int
    """Of its prompt, in the order in which prompts were taken, from 0."""
    tokens: list[int]
    """New tokens only, including the one that ended it."""
    reason: FinishReason


def generate_continuously(
    decoder: Decoder,
    next_prompt: Callable[[], Sequence[int] | None],
    batch: int,
    sampling: SamplingSettings | None = None,
    stop: StopSettings | None = None,
    first_number: int = 0,
) -> Iterator[Finished]:
    """Decodes plainly, up to `batch` sequences at a time; yields each answer as it ends.

    next_prompt() returns the next prompt's token ids, or None if there is none at present. It is
    called again after answers, which may lead to further prompts; the batch stays as wide as it was
    at first. The end comes when it returns None and no sequence is left. An answer depends only on
    its prompt, the settings and its number, which selects its random numbers; `first_number` is the
    first prompt's. Raises UserError as `generate` does.
    """
    first = list(itertools.islice(iter(next_prompt, None), batch))
    if not first:
        return
    # A generator: it leaves the caller's modes within a pass only, not between two.
    with own_modes():
        going = Batch(decoder, PlainStep(), len(first), sampling, stop)
    numbers, following = dict[int, int](), first_number
    waiting = first
    try:
        while numbers or waiting:
            for prompt in waiting:
                seq, _ = going.join(Joining(prompt, following))
                numbers[seq] = following
                following += 1
            with own_modes():
                while going.reading:
                    going.read(PREFILL_ROWS)
                if going.session.active:
                    going.advance()
            ended = going.ended
            for seq in ended:
                reason = going.session.stops.reasons[seq]
                assert reason is not None
                yield Finished(numbers.pop(seq), going.session.stops.new_tokens[seq], reason)
                going.leave(seq)
            waiting = []
            if ended and (not numbers or going.free >= len(first) // REFILL_SHARE):
                waiting = list(itertools.islice(iter(next_prompt, None), going.free))
    finally:
        going.close()
