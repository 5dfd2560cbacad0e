"""A step in one piece against the same step in parts: drafts, tokens, statistics and committed
K/V. So are steps whose drafts are made in Python and verified in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from decoding.invariants import check_invariants

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.session import Session
from multirate.decoding.speculate.drafter import Drafter, Verified
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.runtime.decoder import Decoder, VerifiedDraft


@contextmanager
def verified_in_parts(decoder: Decoder, parts: bool = True) -> Iterator[list[VerifiedDraft]]:
    """Drafts are verified layer by layer and accepted in Python, as other decoders do. parts:
    False: in one call; → what it found.
    """
    found: list[VerifiedDraft] = []
    whole = decoder.verify_draft

    def verify(*args: Any) -> VerifiedDraft | None:
        done = None if parts else whole(*args)
        if done is not None:
            found.append(done)
        return done

    decoder.verify_draft = verify  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del decoder.verify_draft  # type: ignore[method-assign]


def assert_fused_steps_are_steps_in_parts(
    decoder: Decoder,
    make: Callable[[], Drafter],
    prompt: list[int],
    new_tokens: int = 14,
    sampling: SamplingSettings | None = None,
) -> None:
    """``make`` gives a fresh drafter whose ``fused_steps`` run on this decoder: of the prompt, and
    where steps of batches can be fused, of several. The text is plain decoding's either way, unless
    the drafter is lossy.
    """
    _assert_the_same(decoder, make, [prompt], new_tokens, sampling)
    if sampling is None or (make().traits.lossless and not sampling.drops_tokens):
        _assert_the_same(decoder, make, [prompt, prompt[:2], prompt[::-1]], new_tokens, sampling)


def _assert_the_same(
    decoder: Decoder,
    make: Callable[[], Drafter],
    prompts: list[list[int]],
    new_tokens: int,
    sampling: SamplingSettings | None,
) -> None:
    outcomes: list[Any] = []
    stores: list[list[torch.Tensor]] = []
    for whole in (True, False):
        drafter, drafted, texts = make(), [], []
        stored: list[torch.Tensor] = []
        in_one, in_parts = drafter.fused_steps, drafter.draft

        def one(
            *args: Any, in_one: Any = in_one, drafted: list[Any] = drafted, whole: bool = whole
        ) -> Any:
            if not whole:
                return None
            done = in_one(*args)
            assert done is not None, "this would compare parts with parts"
            drafted.extend((step.drafted, step.levels) for step in done)
            return done

        def parts(*args: Any, in_parts: Any = in_parts, drafted: list[Any] = drafted) -> Any:
            made = in_parts(*args)
            drafted.extend((len(d.tokens), max(d.depths)) for d in made)
            return made

        def after(
            session: Any, step: Any, texts: list[Any] = texts, stored: list[torch.Tensor] = stored
        ) -> None:
            cache = session.cache
            texts.append([list(tokens) for tokens in session.sampler.tokens])
            layers = range(decoder.info.num_layers)
            stored[:] = [
                t[seq, :, :length].clone()
                for i in layers
                for t in cache.standard(i)
                for seq, length in enumerate(cache.lengths)
            ]

        drafter.fused_steps, drafter.draft = one, parts  # type: ignore[method-assign]
        with verified_in_parts(decoder):
            output = generate(
                decoder,
                SpeculativeStep(drafter),
                prompts,
                sampling,
                StopSettings(max_new_tokens=new_tokens),
                after_step=after,
            )
        s = output.stats
        counts = (
            s.drafted,
            s.drafted_levels,
            s.accepted,
            s.sequence_steps,
            s.target_passes,
            s.exits,
        )
        outcomes.append((output.sequences, drafted, texts, counts))
        stores.append(stored)
    if len(prompts) > 1 and drafter.traits.adapts:
        # a sequence's last step, of which steps in parts tell the drafter nothing, changes what the
        # others draft
        outcomes, stores = [outcome[:1] for outcome in outcomes], []
    assert outcomes[0] == outcomes[1]
    if drafter.traits.lossless:
        stop = StopSettings(max_new_tokens=new_tokens)
        plain = generate(decoder, PlainStep(), prompts, sampling, stop)
        assert outcomes[0][0] == plain.sequences
    for one_store, other in zip(*stores, strict=True) if stores else ():
        assert torch.equal(one_store, other)


def assert_drafts_are_verified_whole_as_in_parts(
    decoder: Decoder,
    make: Callable[[], Drafter],
    prompts: list[list[int]],
    new_tokens: int = 14,
    sampling: SamplingSettings | None = None,
) -> int:
    """``make`` gives a fresh drafter that drafts in Python, the same every time. Drafts, texts,
    statistics, and what the drafter is told are the same whether a draft is verified in one call
    of this decoder or in parts, in all generations of one drafter; K/V are a fresh prefill's. The
    text is plain decoding's. → accepted tokens.
    """
    stop, outcomes, accepted = StopSettings(max_new_tokens=new_tokens), [], 0

    def at_the_end(session: Session, step: Step) -> None:
        if not session.active:
            check_invariants(session, step)

    for parts in (False, True):
        drafter, seen, told = make(), list[Any](), list[Any]()
        draft, accept = drafter.draft, drafter.accept

        def drafting(*args: Any, draft: Any = draft, seen: list[Any] = seen) -> Any:
            made = draft(*args)
            seen.extend((d.tokens, d.parents) for d in made)
            return made

        def accepting(
            seq: int, verified: Verified, accept: Any = accept, told: list[Any] = told
        ) -> None:
            told.append((verified.path, verified.top, verified.hidden.clone()))
            accept(seq, verified)

        drafter.draft, drafter.accept = drafting, accepting  # type: ignore[method-assign]
        texts, counts = [], []
        for prompt in prompts:
            with verified_in_parts(decoder, parts) as whole:
                output = generate(
                    decoder,
                    SpeculativeStep(drafter),
                    [prompt],
                    sampling,
                    stop,
                    after_step=at_the_end,
                )
            s = output.stats
            assert len(whole) == (0 if parts else s.sequence_steps)
            texts += output.sequences
            counts.append((s.drafted, s.drafted_levels, s.accepted, s.sequence_steps))
            accepted += s.accepted
        hidden = [told_hidden for *_, told_hidden in told]
        outcomes.append((texts, counts, seen, [others for *others, _ in told], hidden))
    (*whole_run, whole_hidden), (*parts_run, parts_hidden) = outcomes
    assert whole_run == parts_run
    assert all(map(torch.equal, whole_hidden, parts_hidden))
    for prompt, text in zip(prompts, whole_run[0], strict=True):
        assert [text] == generate(decoder, PlainStep(), [prompt], sampling, stop).sequences
    return accepted
