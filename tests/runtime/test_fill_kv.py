"""Keys and values of skipped layers: those the layers themselves would write, and nothing else is
touched.
"""

from __future__ import annotations

import pytest
import torch

from multirate.runtime.cuda.decoder import GraphedDecoder
from multirate.runtime.decoder import Decoder
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import Rows

from .tape_recorder import TapeRecorder
from .tiny_models import NAMES, VOCAB, prompts, tiny_model

LENGTHS = (9, 5)  # committed tokens of each sequence, some beyond the windows


def filled(decoder: Decoder) -> KVCache:
    """A cache with prompts in it, of whose next tokens nothing is known yet."""
    cache = decoder.new_cache(len(LENGTHS), 16)
    for b, ids in enumerate(prompts(*LENGTHS)):
        rows = Rows.causal(b, 0, len(ids))
        decoder.layers(decoder.embed(ids, rows.pos), rows, 0, decoder.info.num_layers, cache)
        cache.commit(b, len(ids))
    return cache


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture(name: str, graphed: bool) -> None:
    model = tiny_model(name)
    decoder = GraphedDecoder(model, TapeRecorder()) if graphed else HFDecoder(model)
    expected, got = filled(decoder), filled(decoder)
    rows = Rows.concat([Rows.causal(b, length, 2) for b, length in enumerate(LENGTHS)])
    torch.manual_seed(1)
    hidden = decoder.embed(torch.randint(0, VOCAB, (len(rows),)), rows.pos) + torch.randn(
        len(rows), 32
    )
    kept = hidden.clone()
    for layer in (1, 2):
        decoder.layers(hidden, rows, layer, layer + 1, expected)
    decoder.fill_kv(rows, hidden, 1, 3, got)
    assert torch.equal(hidden, kept)
    for layer in range(3):
        for ours, theirs in zip(got.standard(layer), expected.standard(layer), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    written = [got.keys[2][b, :, length : length + 2] for b, length in enumerate(LENGTHS)]
    assert all(bool(part.abs().amax((0, 2)).all()) for part in written)
    assert not got.keys[0][0, :, LENGTHS[0] :].any(), "layers outside the range are left alone"


def test_rows_that_write_nothing_and_no_layers() -> None:
    decoder = HFDecoder(tiny_model("llama"))
    cache = filled(decoder)
    before = [tensor.clone() for tensor in cache.keys]
    hidden = torch.randn(1, 32)
    decoder.fill_kv(Rows.causal(0, LENGTHS[0], 1), hidden, 2, 2, cache)
    decoder.fill_kv(Rows.accelerated_at(0, 3), hidden, 0, 3, cache)
    assert all(torch.equal(a, b) for a, b in zip(before, cache.keys, strict=True))
    with pytest.raises(ValueError, match="2 rows but rows describes 1"):
        decoder.fill_kv(Rows.causal(0, LENGTHS[0], 1), torch.randn(2, 32), 0, 3, cache)
