"""A step in one piece against the same step in parts: drafts, tokens, statistics and committed
K/V.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from multirate.decoding.drafter import Drafter
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.speculative import SpeculativeStep
from multirate.decoding.stopping import StopSettings
from multirate.model.decoder import Decoder


def assert_fused_steps_are_steps_in_parts(
    decoder: Decoder,
    make: Callable[[], Drafter],
    prompt: list[int],
    new_tokens: int = 14,
    sampling: SamplingSettings | None = None,
) -> None:
    """``make`` gives a fresh drafter whose ``fused_step`` runs on this decoder. The text is plain
    decoding's either way, unless the drafter is lossy.
    """
    outcomes: list[Any] = []
    stores: list[list[torch.Tensor]] = []
    for whole in (True, False):
        drafter, drafted, texts = make(), [], []
        stored: list[torch.Tensor] = []
        in_one, in_parts = drafter.fused_step, drafter.draft

        def one(
            *args: Any, in_one: Any = in_one, drafted: list[Any] = drafted, whole: bool = whole
        ) -> Any:
            if not whole:
                return None
            done = in_one(*args)
            assert done is not None, "this would compare parts with parts"
            drafted.append((done.drafted, done.levels))
            return done

        def parts(*args: Any, in_parts: Any = in_parts, drafted: list[Any] = drafted) -> Any:
            made = in_parts(*args)
            drafted.extend((len(d.tokens), max(d.depths)) for d in made)
            return made

        def after(
            session: Any, step: Any, texts: list[Any] = texts, stored: list[torch.Tensor] = stored
        ) -> None:
            cache = session.cache
            texts.append(list(session.sampler.tokens[0]))
            layers = range(decoder.info.num_layers)
            stored[:] = [
                t[:, :, : cache.lengths[0]].clone() for i in layers for t in cache.standard(i)
            ]

        drafter.fused_step, drafter.draft = one, parts  # type: ignore[method-assign]
        output = generate(
            decoder,
            SpeculativeStep(drafter),
            [prompt],
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
    assert outcomes[0] == outcomes[1]
    if drafter.lossless:
        stop = StopSettings(max_new_tokens=new_tokens)
        plain = generate(decoder, PlainStep(), [prompt], sampling, stop)
        assert outcomes[0][0] == plain.sequences
    for one_store, other in zip(*stores, strict=True):
        assert torch.equal(one_store, other)
