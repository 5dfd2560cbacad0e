"""What must hold after every round, checked the slow way. A debugging aid and a test oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from multirate.model.decoder import Decoder
from multirate.model.kv_cache import KVCache
from multirate.model.rows import Rows


@torch.no_grad()
def check_invariants(
    decoder: Decoder, cache: KVCache, tokens: Sequence[Sequence[int]], atol: float = 1e-4, skip: Sequence[int] = ()
) -> None:
    """Every layer holds exactly the emitted tokens but the last, and the K/V that a fresh prefill would write.

    tokens[b]: prompt and emitted tokens of sequence b. skip: sequences that never ran (no room for a token).
    Raises AssertionError naming sequence, layer and difference.
    """
    for b, sequence in enumerate(tokens):
        if b in skip:
            continue
        length = len(sequence) - 1
        if cache.lengths[b] != length:
            raise AssertionError(f"sequence {b}: {cache.lengths[b]} tokens are committed, {length} were accepted")
        fresh = decoder.new_cache(1, length)
        rows = Rows.causal(0, 0, length)
        ids = torch.tensor(list(sequence[:length]), device=decoder.facts.device)
        decoder.layers(decoder.embed(ids, rows.pos), rows, 0, decoder.facts.num_layers, fresh)
        for name, ours, theirs in (("keys", cache.keys, fresh.keys), ("values", cache.values, fresh.values)):
            for layer, (a, f) in enumerate(zip(ours, theirs, strict=True)):
                gap = (a[b, :, :length] - f[0, :, :length]).abs().max().item()
                if not gap <= atol:
                    raise AssertionError(f"sequence {b}, layer {layer}: {name} are {gap:.3g} off a fresh prefill's")
