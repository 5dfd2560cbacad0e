"""What speculative decoding needs of rows and cache: rollback, trees, `keep` and rows that only
read.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.hf.row_plan import RowPlan
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import Rows

from .tiny_models import NAMES, VOCAB, prompts, tiny_model

# Full attention, windows on every layer, mixed windows with two rotaries, soft-capping, learned
# positions, sinks + MoE.
SOME = ["llama", "mistral", "gemma3_text", "gemma2", "gpt2", "gpt_oss"]
CLOSE = {"atol": 5e-5, "rtol": 1e-5}


def decoder_of(name: str) -> HFDecoder:
    if name not in _decoders:
        _decoders[name] = HFDecoder(tiny_model(name))
    return _decoders[name]


_decoders: dict[str, HFDecoder] = {}


def forward(decoder: HFDecoder, ids: list[int], rows: Rows, cache: KVCache) -> torch.Tensor:
    x = decoder.embed(torch.tensor(ids), rows.pos)
    return decoder.logits(decoder.layers(x, rows, 0, decoder.info.num_layers, cache))


def last_logits(decoder: HFDecoder, ids: list[int]) -> torch.Tensor:
    return forward(decoder, ids, Rows.causal(0, 0, len(ids)), decoder.new_cache(1, 64))[-1]


tokens = st.integers(2, VOCAB - 1)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SOME), st.integers(1, 2), st.data())
def test_rollback_equals_never_having_drafted(name: str, batch: int, data: st.DataObject) -> None:
    """Random drafts, partial acceptance and truncation, over several sequences: the text alone
    decides the logits.
    """
    decoder = decoder_of(name)
    cache = decoder.new_cache(batch, 4)
    texts: list[list[int]] = [[] for _ in range(batch)]
    for _ in range(data.draw(st.integers(1, 4))):
        new = [data.draw(st.lists(tokens, min_size=1, max_size=6)) for _ in range(batch)]
        parts = [Rows.causal(b, cache.lengths[b], len(ids)) for b, ids in enumerate(new)]
        got = forward(decoder, [t for ids in new for t in ids], Rows.concat(parts), cache)
        ends = np.cumsum([len(ids) for ids in new]) - 1
        for b, ids in enumerate(new):
            torch.testing.assert_close(got[ends[b]], last_logits(decoder, texts[b] + ids), **CLOSE)
            accepted = data.draw(st.integers(0, len(ids)))
            cache.commit(b, accepted)
            texts[b] += ids[:accepted]
            back = data.draw(st.integers(0, len(texts[b])))
            cache.truncate(b, back)
            del texts[b][back:]
            assert cache.lengths[b] == len(texts[b])


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SOME), st.data())
def test_tree_rows_equal_each_path_as_a_chain(name: str, data: st.DataObject) -> None:
    """Two sequences, each with a random tree after a random prompt; then `keep` of one path equals
    a fresh prefill.
    """
    decoder = decoder_of(name)
    texts = [data.draw(st.lists(tokens, min_size=1, max_size=10)) for _ in range(2)]
    cache = decoder.new_cache(2, 32)
    forward(
        decoder,
        texts[0] + texts[1],
        Rows.concat([Rows.causal(b, 0, len(t)) for b, t in enumerate(texts)]),
        cache,
    )
    trees, nodes = [], []
    for b, text in enumerate(texts):
        cache.commit(b, len(text))
        size = data.draw(st.integers(0, 7))
        trees.append([data.draw(st.integers(0, i)) for i in range(size)])
        nodes.append([data.draw(tokens) for _ in range(size + 1)])
    rows = Rows.concat(
        [
            Rows.draft_tree(b, len(t), tree)
            for b, (t, tree) in enumerate(zip(texts, trees, strict=True))
        ]
    )
    got = forward(decoder, nodes[0] + nodes[1], rows, cache).split([len(n) for n in nodes])

    for b, (text, tree, ids) in enumerate(zip(texts, trees, nodes, strict=True)):
        paths = [[0]]
        for node, parent in enumerate(tree, start=1):
            paths.append([*paths[parent], node])
        for node, path in enumerate(paths):
            torch.testing.assert_close(
                got[b][node], last_logits(decoder, text + [ids[i] for i in path]), **CLOSE
            )
        path = paths[data.draw(st.integers(0, len(tree)))]
        cache.keep(b, [len(text) + i for i in path])
        kept = text + [ids[i] for i in path]
        fresh = decoder.new_cache(1, 32)
        forward(decoder, kept, Rows.causal(0, 0, len(kept)), fresh)
        for store, wanted in ((cache.keys, fresh.keys), (cache.values, fresh.values)):
            for a, w in zip(store, wanted, strict=True):
                torch.testing.assert_close(a[b, :, : len(kept)], w[0, :, : len(kept)], **CLOSE)
        assert cache.lengths[b] == len(kept)
        assert (cache.positions[b, : len(kept)] == np.arange(len(kept))).all()
        again = forward(decoder, [7], Rows.causal(b, len(kept), 1), cache)[0]
        torch.testing.assert_close(again, last_logits(decoder, [*kept, 7]), **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_accelerated_rows_without_adapters_equal_the_slow_rows(name: str) -> None:
    """Same token, same layer: they read the slow K/V written in the same call, and write
    nothing.
    """
    decoder, (a, b) = decoder_of(name), prompts(9, 5, seed=2)
    total = decoder.info.num_layers
    slow = Rows.concat([Rows.causal(0, 0, 9), Rows.causal(1, 0, 5)])
    both = Rows.concat([slow, Rows.accelerated_at(1, np.arange(5)), Rows.accelerated_at(0, [8, 3])])
    x = decoder.embed(torch.cat([a, b]), slow.pos)
    alone, together = decoder.new_cache(2, 16), decoder.new_cache(2, 16)
    expected = decoder.layers(x, slow, 0, total, alone)
    out = decoder.layers(torch.cat([x, x[9:14], x[[8, 3]]]), both, 0, total, together)
    torch.testing.assert_close(out[:14], expected, **CLOSE)
    torch.testing.assert_close(out[14:], torch.cat([expected[9:14], expected[[8, 3]]]), **CLOSE)
    for store, wanted in ((together.keys, alone.keys), (together.values, alone.values)):
        for got, w in zip(store, wanted, strict=True):
            torch.testing.assert_close(got, w, **CLOSE)
            assert not got[:, :, 9:].any() and not got[1, :, 5:].any()
    assert together.lengths == [0, 0]

    # A call of accelerated rows alone (the slow ones were run before) reads the same and leaves
    # every byte alone.
    before = [t.clone() for t in alone.keys + alone.values]
    only = decoder.layers(x[:9], Rows.accelerated_at(0, np.arange(9)), 0, total, alone)
    torch.testing.assert_close(only, expected[:9], **CLOSE)
    assert all(torch.equal(t, o) for t, o in zip(alone.keys + alone.values, before, strict=True))


def test_attention_reads_views_of_the_cache() -> None:
    """No copy of K/V per step: what attention gets aliases the cache, for one sequence and for a
    batch.
    """
    decoder = decoder_of("llama")
    cache = decoder.new_cache(3, 32)
    for rows in (Rows.causal(1, 4, 1), Rows.concat([Rows.causal(b, 4 + b, 1) for b in range(3)])):
        plan = RowPlan(rows, cache, torch.device("cpu"), torch.float32, fused_causal=True)
        key = torch.randn(*plan.shape, 2, 8).transpose(1, 2)
        keys, values = plan.update(key, key, 0)
        assert keys.untyped_storage().data_ptr() == cache.keys[0].untyped_storage().data_ptr()
        assert values.untyped_storage().data_ptr() == cache.values[0].untyped_storage().data_ptr()
        assert torch.equal(keys[-1, :, rows.slot[-1]], key[-1, :, -1])


def test_mask_follows_a_reused_rows_object() -> None:
    """The plan of a `Rows` object is reused between pieces of the layers, but not once cached
    positions changed.
    """
    decoder, (ids,) = decoder_of("mistral"), prompts(12, seed=9)
    cache = decoder.new_cache(1, 32)
    step = Rows.causal(0, 11, 1)
    forward(decoder, ids[:11].tolist(), Rows.causal(0, 0, 11), cache)
    first = forward(decoder, ids[11:].tolist(), step, cache)
    shifted = Rows.causal(0, 0, 11)
    far = Rows(shifted.seq, shifted.slot, shifted.pos + 40, shifted.prefix, shifted.tree)
    cache.note_positions(far)  # same slots and K/V, other positions: the window now hides nothing
    assert not torch.allclose(forward(decoder, ids[11:].tolist(), step, cache), first, atol=1e-3)
    cache.note_positions(shifted)
    torch.testing.assert_close(forward(decoder, ids[11:].tolist(), step, cache), first, **CLOSE)


def test_rows_of_an_unknown_sequence_are_refused() -> None:
    decoder = decoder_of("llama")
    cache = decoder.new_cache(1, 4)
    with pytest.raises(ValueError, match="sequence 1 of 1"):
        forward(decoder, [3], Rows.causal(1, 0, 1), cache)
    with pytest.raises(ValueError, match="2 rows"):
        decoder.layers(torch.zeros(2, 32), Rows.causal(0, 0, 1), 0, 1, cache)
