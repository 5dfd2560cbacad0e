"""Speculative decoding: draft, verify all rows in one pass, accept, commit. The loop knows no method."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multirate.decoding.acceptance import accept_greedy, accept_sampled
from multirate.decoding.drafter import Draft, Drafter
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.prefix_cache import Conversation
from multirate.decoding.results import GenerationOutput, OnTokens
from multirate.decoding.sampler import Sampler
from multirate.decoding.session import Session
from multirate.decoding.stopping import StopSettings
from multirate.model.decoder import Decoder
from multirate.model.kv_cache import KVCache
from multirate.model.rows import Rows

Verdict = tuple[list[int], int]
"""Accepted path and bonus token (see acceptance.py)."""
AfterRound = Callable[[KVCache, Sampler], None]


@torch.no_grad()
def generate_speculative(
    decoder: Decoder,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingSettings | None = None,
    stop: StopSettings | None = None,
    on_tokens: OnTokens | None = None,
    after_round: AfterRound | None = None,
    conversation: Conversation | None = None,
) -> GenerationOutput:
    """The base model's own continuation of every prompt (token ids), several tokens per pass where drafts are good.

    Greedy: the tokens of `generate_autoregressive`; sampling: tokens of the same distribution (acceptance.py).
    on_tokens(b, tokens): called with the new tokens of sequence b as they are emitted.
    after_round(cache, sampler): for tests; called when a round is committed, see invariants.py.
    conversation: an earlier generation, by this drafter, that a single prompt may go on from; this one is left there.
    Raises UserError for prompts that cannot be used, ValueError for a draft that breaks its contract.
    """
    session = Session(
        decoder, prompts, sampling, stop, on_tokens, drafter.max_nodes + 1, conversation, usable=drafter.kept
    )
    cache, sampler, stops = session.cache, session.sampler, session.stops
    if session.stats.resumed:
        drafter.resume(cache, sampler)
    else:
        drafter.begin(cache, sampler)
    if session.active:
        seqs = session.active
        hidden_prompts = session.prefill()
        session.first_tokens(hidden_prompts)
        going = [(b, hidden) for b, hidden in zip(seqs, hidden_prompts, strict=True) if stops.reasons[b] is None]
        if going:
            drafter.prefill([b for b, _ in going], [prompts[b] for b, _ in going], [hidden for _, hidden in going])
        del hidden_prompts, going
    while session.active:
        if sampler.plain and len(session.active) == 1 and _whole_round(session, drafter, session.active[0]):
            if after_round is not None:
                after_round(cache, sampler)
            continue
        seqs = session.active
        roots = [sampler.tokens[b][-1] for b in seqs]
        limits = [stops.remaining(b) - 1 for b in seqs]
        drafts = drafter.draft(seqs, roots, limits, sampler)
        drafts = [draft.cut(limit, drafter.max_nodes) for draft, limit in zip(drafts, limits, strict=True)]
        hidden, verdicts = _verify(session, drafter.start, seqs, roots, drafts)
        offset = 0
        for b, draft, (path, bonus) in zip(seqs, drafts, verdicts, strict=True):
            kept = session.emit(b, [*(draft.tokens[node - 1] for node in path[1:]), bonus])
            levels = len(draft.tokens) if draft.is_chain else max(draft.depths)
            _count(session, len(draft.tokens), levels, accepted=min(kept, len(path) - 1))
            path = path[:kept]  # the last token emitted is the next root: it is not in the cache yet
            length = cache.lengths[b]
            cache.keep(b, [length + node for node in path])
            if stops.reasons[b] is None:
                drafter.accept(b, path, _rows_of(hidden, offset, path))
            offset += len(draft.tokens) + 1
        session.stats.target_passes += 1
        session.drop_finished()
        if after_round is not None:
            after_round(cache, sampler)
    return session.output()


def _whole_round(session: Session, drafter: Drafter, seq: int) -> bool:
    """One round of the only active sequence in one piece, if the drafter can (Drafter.round)."""
    stops = session.stops
    done = drafter.round(seq, session.sampler.tokens[seq][-1], stops.remaining(seq) - 1)
    if done is None:
        return False
    kept = session.emit(seq, done.tokens)
    session.cache.commit(seq, kept)
    _count(session, done.drafted, done.levels, accepted=min(kept, len(done.tokens) - 1))
    session.stats.target_passes += 1
    if stops.reasons[seq] is not None:
        session.drop_finished()
    return True


def _rows_for(length: int, seq: int, draft: Draft) -> Rows:
    draft.check()
    if draft.is_chain:
        return Rows.causal(seq, length, len(draft.tokens) + 1)
    return Rows.draft_tree(seq, length, draft.parents)


def _verify(
    session: Session, start: int, seqs: list[int], roots: list[int], drafts: list[Draft]
) -> tuple[Tensor, list[Verdict]]:
    """h_L [N, d] of the roots and nodes of all drafts, sequence after sequence, and what is accepted of each draft."""
    x, rows = _entering(session, start, seqs, roots, drafts)
    decoder = session.decoder
    if session.sampler.plain:
        hidden, target = decoder.greedy(rows, session.cache, x=x, start=start)
        targets = _split(target, [len(draft.tokens) + 1 for draft in drafts])
        return hidden, [accept_greedy(draft, part) for draft, part in zip(drafts, targets, strict=True)]
    hidden = decoder.layers(x, rows, start, decoder.facts.num_layers, session.cache)
    return hidden, _judge(session, seqs, drafts, decoder.logits(hidden))


def _entering(
    session: Session, start: int, seqs: list[int], roots: list[int], drafts: list[Draft]
) -> tuple[Tensor, Rows]:
    """Residuals [N, d] of all roots and nodes as they enter layer ``start``, and their rows."""
    lengths = session.cache.lengths
    parts = [_rows_for(lengths[b], b, draft) for b, draft in zip(seqs, drafts, strict=True)]
    rows = Rows.concat(parts)
    bare = [i for i, draft in enumerate(drafts) if draft.hidden is None]
    entering: list[Tensor | None] = [draft.hidden for draft in drafts]
    if bare:
        # these drafters left embedding and the layers below `start` to us: one call for all of them
        ids = [token for i in bare for token in (roots[i], *drafts[i].tokens)]
        bare_rows = rows if len(bare) == len(drafts) else Rows.concat([parts[i] for i in bare])
        x = session.forward(ids, bare_rows, stop=start)
        if len(bare) == len(drafts):
            return x, rows
        for i, part in zip(bare, x.split([len(parts[i]) for i in bare]), strict=True):
            entering[i] = part
    hidden = [part for part in entering if part is not None]
    return hidden[0] if len(hidden) == 1 else torch.cat(hidden), rows


def _judge(session: Session, seqs: list[int], drafts: list[Draft], logits: Tensor) -> list[Verdict]:
    """The verdict on every draft; logits [N, V] as `_verify`'s rows. All rows go through one call per step."""
    sampler = session.sampler
    counts = [len(draft.tokens) + 1 for draft in drafts]
    row_seqs = [b for b, count in zip(seqs, counts, strict=True) for _ in range(count)]
    paths = None
    if sampler.settings.uses_context:
        paths = [path for draft in drafts for path in draft.path_tokens()]
    if sampler.greedy or all(draft.probs is None for draft in drafts):
        target = sampler.choose(logits, row_seqs, paths)
        return [accept_greedy(draft, part) for draft, part in zip(drafts, _split(target, counts), strict=True)]
    probs = sampler.distribution(logits, row_seqs, paths)
    verdicts = []
    for b, draft, p in zip(seqs, drafts, probs.split(counts), strict=True):
        if draft.probs is not None and draft.is_chain:
            verdicts.append(accept_sampled(draft, p, draft.probs, sampler.generators[b]))
        else:
            verdicts.append(accept_greedy(draft, sampler.draw(p, [b] * len(p))))
    return verdicts


def _split(values: list[int], counts: list[int]) -> list[list[int]]:
    parts, start = [], 0
    for count in counts:
        parts.append(values[start : start + count])
        start += count
    return parts


def _rows_of(hidden: Tensor, offset: int, path: list[int]) -> Tensor:
    """Rows of the accepted nodes, [len(path), d]; a view where they are contiguous."""
    if path[-1] == len(path) - 1:
        return hidden[offset : offset + len(path)]
    return hidden[[offset + node for node in path]]


def _count(session: Session, drafted: int, levels: int, accepted: int) -> None:
    stats = session.stats
    stats.sequence_steps += 1
    stats.drafted += drafted
    stats.drafted_levels += levels
    stats.accepted += accepted
