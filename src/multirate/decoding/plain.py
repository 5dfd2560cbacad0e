"""Plain decoding, one token per pass: the baseline of every speedup."""

from __future__ import annotations

from multirate.decoding.session import Session
from multirate.decoding.step import Step
from multirate.runtime.rows import Rows


class PlainStep(Step):
    """Runs each active sequence's last token through all layers and takes the next token from its
    logits.
    """

    tells_split = True
    joins = True

    def run(self, session: Session) -> None:
        cache, sampler, decoder = session.cache, session.sampler, session.decoder
        seqs = session.active
        rows = Rows.concat([Rows.causal(b, cache.lengths[b], 1) for b in seqs])
        ids = [sampler.tokens[b][-1] for b in seqs]
        if sampler.by_argmax(seqs):
            noise = sampler.noises(seqs, [0] * len(seqs))
            _, tokens = decoder.next_tokens(rows, cache, ids, noise=noise)
        else:
            tokens = sampler.choose(decoder.logits(session.forward(ids, rows)), seqs)
        for b, token in zip(seqs, tokens, strict=True):
            cache.commit(b, 1)
            session.emit(b, [token])
