"""Reads given texts into a cache, a piece at a time, so that memory does not grow with the square
of the text's length. All code that runs a model over existing text uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from multirate.errors import UserError
from multirate.runtime.decoder import Decoder, argmax_rows
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import Rows

PREFILL_ROWS = 1024
"""Maximum number of rows in one call; limits the memory of masks and activations. Longer texts are
cut at multiples of it, counted from where reading starts.
"""
LOGITS_AT_ONCE = 64
"""How many rows' logits are in memory together; with a vocabulary of 150,000 they take 38 MB."""

Read = tuple[int, Mapping[int, Tensor]]
"""The sequence of a piece, and the residuals [n, d] that enter each layer."""


def read_in_pieces(
    decoder: Decoder,
    cache: KVCache,
    texts: Mapping[int, Sequence[int]],
    taps: Sequence[int] = (),
    start: int = 0,
    stop: int | None = None,
) -> Iterator[Read]:
    """Runs layers [0, stop) (None: all) on each sequence's text from token `start` on, and commits
    it.

    Yields its pieces in order: the residuals entering the layers `taps`, and layer `stop`. Short
    texts share a call. No gradients are kept. Raises UserError for a text that is longer than the
    model's positions.
    """
    info = decoder.info
    stop = info.num_layers if stop is None else stop
    longest = max(map(len, texts.values()), default=0)
    if info.max_positions is not None and longest > info.max_positions:
        raise UserError(f"a text of {longest} tokens does not fit {info.context}")
    batch: list[tuple[int, int, Sequence[int]]] = []
    waiting = 0
    for seq, tokens in texts.items():
        for first in range(start, len(tokens), PREFILL_ROWS):
            part = tokens[first : first + PREFILL_ROWS]
            if batch and waiting + len(part) > PREFILL_ROWS:
                yield from read_rows(decoder, cache, batch, taps, stop)
                batch, waiting = [], 0
            batch.append((seq, first, part))
            waiting += len(part)
    if batch:
        yield from read_rows(decoder, cache, batch, taps, stop)


@torch.no_grad()
def read_rows(
    decoder: Decoder,
    cache: KVCache,
    batch: Sequence[tuple[int, int, Sequence[int]]],
    taps: Sequence[int],
    stop: int,
) -> list[Read]:
    """One call for parts of texts: (sequence, first token, tokens) each, which are committed."""
    rows = Rows.concat([Rows.causal(seq, first, len(part)) for seq, first, part in batch])
    ids = [token for _, _, part in batch for token in part]
    x = decoder.embed(torch.tensor(ids, device=decoder.info.device, dtype=torch.int64), rows.pos)
    x, found = decoder.layers_with_taps(x, rows, 0, stop, cache, taps)
    counts = [len(part) for _, _, part in batch]
    pieces = {layer: states.split(counts) for layer, states in {**found, stop: x}.items()}
    for seq, _, part in batch:
        cache.commit(seq, len(part))
    return [
        (seq, {layer: parts[i] for layer, parts in pieces.items()})
        for i, (seq, _, _) in enumerate(batch)
    ]


@torch.no_grad()
def score(
    decoder: Decoder, context: Sequence[int], continuation: Sequence[int]
) -> tuple[list[float], list[int]]:
    """Runs the full model on a given text. Returns the log-probability, in nats, of each token of
    the continuation given the text before it, and the argmax there.

    context: at least one token.
    """
    if not continuation:
        return [], []
    text = [*context, *continuation[:-1]]
    cache = decoder.new_cache(1, len(text))
    last = decoder.info.num_layers
    log_probabilities, chosen = list[float](), list[int]()
    unread = 1 - len(context)  # of the continuation, the token that the next row is scored by
    for _, states in read_in_pieces(decoder, cache, {0: text}):
        hidden = states[last][max(-unread, 0) :]
        unread += len(states[last]) - len(hidden)
        for rows in hidden.split(LOGITS_AT_ONCE):
            said = list(continuation[unread : unread + len(rows)])
            logits = decoder.logits(rows).float()
            each = torch.log_softmax(logits, dim=-1)[range(len(said)), said]
            log_probabilities += each.double().tolist()
            chosen += argmax_rows(logits)
            unread += len(rows)
    decoder.release_cache(cache)
    return log_probabilities, chosen
