"""How likely a given text is under the full model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from multirate.model.decoder import Decoder, argmax_rows
from multirate.model.rows import Rows
from multirate.torch_modes import own_modes

_LOGITS_AT_ONCE = 64
"""Rows whose logits are in memory together: a vocabulary of 150,000 takes 38 MB for as many."""


@own_modes()
def log_likelihood(
    decoder: Decoder, context: Sequence[int], continuation: Sequence[int]
) -> tuple[float, bool]:
    """(the sum of the continuation's log-probabilities after the context, in nats; whether greedy
    decoding would say it), from one pass through all layers.

    context: at least one token. The sum is 0 and greedy for an empty continuation.
    """
    if not continuation:
        return 0.0, True
    text = [*context, *continuation[:-1]]
    rows = Rows.causal(0, 0, len(text))
    cache = decoder.new_cache(1, len(text))
    x = decoder.embed(torch.tensor(text, device=decoder.info.device, dtype=torch.int64), rows.pos)
    x = decoder.layers(x, rows, 0, decoder.info.num_layers, cache)
    x = x[len(context) - 1 :]
    total, greedy = 0.0, True
    for first in range(0, len(continuation), _LOGITS_AT_ONCE):
        said = list(continuation[first : first + _LOGITS_AT_ONCE])
        logits = decoder.logits(x[first : first + len(said)]).float()
        each = torch.log_softmax(logits, dim=-1)[range(len(said)), said]
        total += float(each.double().sum())
        greedy = greedy and argmax_rows(logits) == said
    decoder.release_cache(cache)
    return total, greedy
