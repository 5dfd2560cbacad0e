"""Plain decoding, one token per pass: the baseline that every speedup is quoted against."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.prefix_cache import Conversation
from multirate.decoding.results import GenerationOutput, OnTokens
from multirate.decoding.session import Session
from multirate.decoding.stopping import StopSettings
from multirate.model.decoder import Decoder
from multirate.model.rows import Rows


@torch.no_grad()
def generate_autoregressive(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingSettings | None = None,
    stop: StopSettings | None = None,
    on_tokens: OnTokens | None = None,
    conversation: Conversation | None = None,
) -> GenerationOutput:
    """Continues every prompt (token ids); see SamplingSettings and StopSettings for the defaults.

    on_tokens(b, tokens): called with the new tokens of sequence b as they are emitted.
    conversation: an earlier generation that a single prompt may go on from; this one is left there (see Session).
    Raises UserError for prompts that cannot be used.
    """
    session = Session(decoder, prompts, sampling, stop, on_tokens, conversation=conversation)
    if session.active:
        session.first_tokens(session.prefill())
    cache, sampler, stats = session.cache, session.sampler, session.stats
    while session.active:
        seqs = session.active
        rows = Rows.concat([Rows.causal(b, cache.lengths[b], 1) for b in seqs])
        ids = [sampler.tokens[b][-1] for b in seqs]
        if sampler.plain:
            _, tokens = decoder.greedy(rows, cache, ids)
        else:
            tokens = sampler.choose(decoder.logits(session.forward(ids, rows)), seqs)
        stats.target_passes += 1
        stats.sequence_steps += len(seqs)
        for b, token in zip(seqs, tokens, strict=True):
            cache.commit(b, 1)
            session.emit(b, [token])
        session.drop_finished()
    return session.output()
