"""Log-probabilities by the model's own logits, before any sampling setting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multirate.decoding.prefill import LOGITS_AT_ONCE
from multirate.runtime.decoder import Decoder
from multirate.serving.requests import TokenLogprob


def of_token(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """Of one token, by logits [V] at its place, with the `top` likeliest ones there."""
    return _of_rows(logits[None], [token], top)[0]


def of_prompt(
    decoder: Decoder, hidden: Tensor, following: Sequence[int], top: int
) -> list[TokenLogprob]:
    """Of the tokens that follow the first len(following) rows of h_L, hidden [n, d]."""
    found, rows = list[TokenLogprob](), hidden[: len(following)]
    for part in rows.split(LOGITS_AT_ONCE):
        tokens = following[len(found) : len(found) + len(part)]
        found += _of_rows(decoder.logits(part), tokens, top)
    return found


def _of_rows(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    known = torch.log_softmax(logits.float(), dim=-1)
    said = known[range(len(tokens)), list(tokens)].tolist()
    best = known.topk(min(top, known.shape[-1]), dim=-1)
    return [
        TokenLogprob(one, tuple(zip(ids, values, strict=True)))
        for one, ids, values in zip(said, best.indices.tolist(), best.values.tolist(), strict=True)
    ]
