"""The decoding loop. There is only one; the step (step.py) decides what a pass does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.prefix_cache import PrefixCache
from multirate.decoding.results import GenerationOutput, OnTokens
from multirate.decoding.session import Session
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.runtime.decoder import Decoder
from multirate.runtime.time_split import TimeSplit
from multirate.torch_modes import own_modes

AfterStep = Callable[[Session, Step], None]


@own_modes()
def generate(
    decoder: Decoder,
    step: Step,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingSettings | None = None,
    stop: StopSettings | None = None,
    on_tokens: OnTokens | None = None,
    after_step: AfterStep | None = None,
    prefix_cache: PrefixCache | None = None,
) -> GenerationOutput:
    """Continues every prompt (token ids). SamplingSettings and StopSettings have the defaults.

    With a lossless step the output is the base model's own, whatever the kind of step.

    on_tokens(b, tokens): called with the new tokens of sequence b as they are emitted.
    after_step(session, step): for tests; called when a step is committed.
    prefix_cache: K/V from an earlier generation with this step, which a single prompt may continue
        from. This generation leaves its own there (see Session).

    Raises UserError for prompts that cannot be used, ValueError for a step that breaks its
    contract.
    """
    session = Session(
        decoder, prompts, sampling, stop, on_tokens, step.slots, prefix_cache, usable=step.usable
    )
    step.begin(session, resumed=session.stats.resumed > 0)
    if session.active:
        _read_prompts(session, step)
    spent = decoder.spent() if step.tells_split else None
    while session.active:
        session.count_steps()
        step.run(session)
        session.drop_finished()
        if after_step is not None:
            after_step(session, step)
    step.finish(session)
    if spent is not None and (now := decoder.spent()) is not None:
        session.stats.split = now - spent + TimeSplit(draft=step.drafting_seconds)
    return session.output()


def _read_prompts(session: Session, step: Step) -> None:
    """The prefill and the first tokens. A separate function, so that the prompts' residuals are
    freed when it returns.
    """
    seqs = session.active
    hidden, taps = session.prefill(step.taps)
    session.first_tokens(hidden)
    going = [i for i, b in enumerate(seqs) if session.stops.reasons[b] is None]
    if going:
        step.prefilled(
            session, [seqs[i] for i in going], [hidden[i] for i in going], [taps[i] for i in going]
        )
