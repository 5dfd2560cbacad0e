"""Continuous batching: when a sequence ends, the next prompt takes its place at once.

`generate` answers a batch as a whole, so every answer waits for the longest. Here the batch keeps
its size as long as there are prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.plain import PlainStep
from multirate.decoding.results import FinishReason
from multirate.decoding.session import Session
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
    first = [prompt for _ in range(batch) if (prompt := next_prompt()) is not None]
    if not first:
        return
    # A generator: it leaves the caller's modes within a pass only, not between two.
    with own_modes():
        session = Session(decoder, first, sampling, stop)
    numbers = {seq: first_number + seq for seq in range(len(first))}
    for seq, prompt in enumerate(first):
        session.sampler.restart(seq, prompt, numbers[seq])
    following, fresh, step = first_number + len(first), list(session.active), PlainStep()
    try:
        while numbers:
            with own_modes():
                _advance(session, step, fresh)
            ended = [seq for seq in sorted(numbers) if session.stops.reasons[seq] is not None]
            for seq in ended:
                reason = session.stops.reasons[seq]
                assert reason is not None
                yield Finished(numbers.pop(seq), session.stops.new_tokens[seq], reason)
            fresh = []
            free = [seq for seq in range(len(first)) if seq not in numbers]
            if not ended or (numbers and len(free) < len(first) // REFILL_SHARE):
                continue
            for seq in free:
                if (replacement := next_prompt()) is not None:
                    session.replace(seq, replacement, following)
                    numbers[seq] = following
                    following += 1
                    fresh.append(seq)
    finally:
        decoder.release_cache(session.cache)


def _advance(session: Session, step: PlainStep, fresh: list[int]) -> None:
    """Reads the `fresh` sequences' prompts, then runs one pass of all."""
    fresh = [seq for seq in fresh if seq in session.active]
    if fresh:
        hidden, _ = session.prefill(seqs=fresh)
        session.first_tokens(hidden, fresh)
    if session.active:
        session.stats.target_passes += 1
        session.stats.sequence_steps += len(session.active)
        step.run(session)
        session.drop_finished()
