"""Slow checks of what must hold after every step, for debugging and tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multirate.decoding.session import Session
from multirate.decoding.step import Step
from multirate.runtime.rows import Rows


@torch.no_grad()
def check_invariants(
    session: Session, step: Step | None = None, atol: float = 1e-4, skip: Sequence[int] = ()
) -> None:
    """Checks that every layer holds exactly the emitted tokens except the last and, where exact,
    the K/V of a fresh prefill.

    Exact are the tokens before the first one that `session.note_inexact` marked, outside the holes
    that the step declares (tokens whose deeper layers are still to run). All other committed slots
    outside a hole must at least have been written, in every layer. skip: sequences that never ran
    (no room for a token). Raises AssertionError naming sequence, layer and difference.
    """
    decoder, cache = session.decoder, session.cache
    layers = decoder.info.num_layers
    for b, sequence in enumerate(session.sampler.tokens):
        if b in skip:
            continue
        length = len(sequence) - 1
        if cache.lengths[b] != length:
            raise AssertionError(
                f"sequence {b}: {cache.lengths[b]} tokens are committed, {length} were accepted"
            )
        fresh = decoder.new_cache(1, length)
        rows = Rows.causal(0, 0, length)
        ids = torch.tensor(list(sequence[:length]), device=decoder.info.device, dtype=torch.int64)
        decoder.layers(decoder.embed(ids, rows.pos), rows, 0, layers, fresh)
        exact = session.exact_length(b)
        for layer in range(layers):
            present = torch.ones(length, dtype=torch.bool, device="cpu")
            for hole in step.holes(b) if step is not None else ():
                if hole.start <= layer < hole.stop:
                    present[hole.first : hole.last] = False
            pairs = zip(cache.standard(layer), fresh.standard(layer), strict=True)
            for name, (ours, theirs) in zip(("keys", "values"), pairs, strict=True):
                where = f"sequence {b}, layer {layer}: {name}"
                kept, true = ours[b, :, :length].float().cpu(), theirs[0, :, :length].float().cpu()
                # zeros where a prefill writes something else: the slot is as the cache was made
                if bool((present & _zero(kept) & ~_zero(true)).any()):
                    raise AssertionError(f"{where} of a committed token were never written")
                gap = (kept - true).abs().amax((0, 2))[:exact][present[:exact]]
                if len(gap) and not gap.max().item() <= atol:
                    raise AssertionError(
                        f"{where} are {gap.max().item():.3g} off a fresh prefill's"
                    )


def _zero(stored: Tensor) -> Tensor:
    """[H, T, D] → [T]: whether a token's vectors are all zero."""
    return stored.abs().amax((0, 2)) == 0
