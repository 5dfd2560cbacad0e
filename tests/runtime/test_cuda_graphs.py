"""Captured passes against HFDecoder and transformers: the tape repeats tensor operations only, as a
CUDA graph does.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.stopping import StopSettings
from multirate.engine import Engine
from multirate.runtime.cuda import decoder as cuda_graphs
from multirate.runtime.cuda.decoder import GraphedDecoder
from multirate.runtime.cuda.static_cache import LEAST_CAPACITY, StaticKVCache
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.kv_cache import KVCache, LayerKV
from multirate.runtime.load import own_layers_decoder
from multirate.runtime.rows import Rows

from .tape_recorder import EagerRecorder, TapeRecorder
from .test_adapters import LinearAdapter
from .tiny_models import MOE, NAMES, VOCAB, prompts, tiny_model

DENSE = [n for n in NAMES if n not in MOE]
# Full attention, windows on every layer, mixed windows with two rotaries, soft-capping, learned
# positions.
SOME = ["llama", "mistral", "gemma3_text", "gemma2", "gpt2"]
CLOSE = {"atol": 5e-5, "rtol": 1e-5}
_pairs: dict[str, tuple[GraphedDecoder, HFDecoder]] = {}


def pair(name: str) -> tuple[GraphedDecoder, HFDecoder]:
    """The decoder under test, replaying tapes, and the reference."""
    if name not in _pairs:
        _pairs[name] = (
            GraphedDecoder(tiny_model(name), TapeRecorder()),
            HFDecoder(tiny_model(name)),
        )
    return _pairs[name]


def tape_of(decoder: GraphedDecoder) -> TapeRecorder:
    assert isinstance(decoder.recorder, TapeRecorder)
    return decoder.recorder


def forward(decoder: HFDecoder, ids: list[int], rows: Rows, cache: KVCache) -> torch.Tensor:
    """In two pieces, as drafting and verifying run them."""
    x = decoder.layers(decoder.embed(torch.tensor(ids), rows.pos), rows, 0, 1, cache)
    return decoder.layers(x, rows, 1, decoder.info.num_layers, cache)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SOME), st.integers(1, 3), st.data())
def test_random_rows_equal_hf_decoder(name: str, batch: int, data: st.DataObject) -> None:
    """Chains and trees, ragged lengths, sequences that take no part, partial acceptance, `keep`:
    always the same.
    """
    graphed, reference = pair(name)
    caches = [graphed.new_cache(batch, 4), reference.new_cache(batch, 4)]
    for _ in range(data.draw(st.integers(2, 5))):
        seqs = data.draw(st.sets(st.integers(0, batch - 1), min_size=1))
        trees = {
            b: [data.draw(st.integers(0, i)) for i in range(data.draw(st.integers(0, 6)))]
            for b in seqs
        }
        rows = Rows.concat(
            [Rows.draft_tree(b, caches[0].lengths[b], parents) for b, parents in trees.items()]
        )
        order = data.draw(st.permutations(range(len(rows))))
        rows = Rows(*(getattr(rows, f)[order] for f in ("seq", "slot", "pos", "prefix", "tree")))
        ids = [data.draw(st.integers(2, VOCAB - 1)) for _ in range(len(rows))]
        got, expected = (
            forward(graphed, ids, rows, caches[0]),
            forward(reference, ids, rows, caches[1]),
        )
        torch.testing.assert_close(got, expected, **CLOSE)
        for b, parents in trees.items():
            path = [data.draw(st.integers(0, len(parents)))]
            while path[0]:
                path.insert(0, parents[path[0] - 1])
            for cache in caches:
                start = cache.lengths[b]
                cache.keep(b, [start + node for node in path])
        for mine, theirs in zip(
            caches[0].keys + caches[0].values, caches[1].keys + caches[1].values, strict=True
        ):
            for b, length in enumerate(caches[1].lengths):
                torch.testing.assert_close(mine[b, :, :length], theirs[b, :, :length], **CLOSE)
    assert graphed.graph_fallback is None


@pytest.mark.parametrize("name", DENSE)
def test_a_capture_depends_on_its_inputs_alone(name: str) -> None:
    """Captured with one input, replayed with others: tokens, positions, slots, masks, flags and
    flagged counts.
    """
    torch.manual_seed(0)
    graphed, reference = (
        GraphedDecoder(tiny_model(name), TapeRecorder()),
        HFDecoder(tiny_model(name)),
    )
    total = graphed.info.num_layers
    adapters = {
        i: LinearAdapter(layer, {"q", "o", "gate", "up", "down", "mlp"})
        for i, layer in enumerate(graphed.parts.layers)
    }
    caches = [graphed.new_cache(2, 64), reference.new_cache(2, 64)]
    prompt = Rows.concat([Rows.causal(0, 0, 20), Rows.causal(1, 0, 13)])
    calls = [
        [Rows.draft_tree(0, 20, [0, 0]), Rows.accelerated_at(0, [20])],
        [Rows.causal(0, 20, 1), Rows.accelerated_at(0, [17, 18, 20]), Rows.accelerated_at(1, [12])],
        [Rows.accelerated_at(1, [3, 9]), Rows.causal(1, 13, 2), Rows.causal(0, 21, 3)],
        [Rows.causal(1, 15, 3), Rows.accelerated_at(1, [15])],
    ]
    for decoder, cache in zip((graphed, reference), caches, strict=True):
        decoder.layers(
            torch.zeros(33, 32) + torch.linspace(-1, 1, 33)[:, None], prompt, 0, total, cache
        )
    before = tape_of(graphed).captured
    for parts in calls:
        rows, x = Rows.concat(parts), torch.randn(sum(map(len, parts)), 32)
        got, expected = (
            decoder.layers(x, rows, 0, total, cache, adapters)
            for decoder, cache in zip((graphed, reference), caches, strict=True)
        )
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
    assert graphed.graph_fallback is None
    assert tape_of(graphed).captured == before + 1  # the four calls fit one shape

    # Other adapters of the same shapes are other captures.
    others = {i: LinearAdapter(layer, {"q", "mlp"}) for i, layer in enumerate(graphed.parts.layers)}
    for chosen in (others, adapters, None):
        got, expected = (
            decoder.layers(x, rows, 0, total, cache, chosen)
            for decoder, cache in zip((graphed, reference), caches, strict=True)
        )
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
    assert tape_of(graphed).captured == before + 3


def test_outputs_survive_later_replays() -> None:
    graphed, reference = pair("llama")
    cache = graphed.new_cache(1, 16)
    outs, expected, other = [], [], reference.new_cache(1, 16)
    for i, token in enumerate(prompts(6)[0].tolist()):
        outs.append(forward(graphed, [token], Rows.causal(0, i, 1), cache))
        expected.append(forward(reference, [token], Rows.causal(0, i, 1), other))
    torch.testing.assert_close(torch.cat(outs), torch.cat(expected), **CLOSE)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
def test_growth_of_the_cache_captures_anew_and_keeps_its_contents(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "round_up", lambda slots: -(-slots // 8) * 8)
    monkeypatch.setattr("multirate.runtime.cuda.static_cache.LEAST_CAPACITY", 8)
    graphed, reference = (
        GraphedDecoder(tiny_model(name), TapeRecorder()),
        HFDecoder(tiny_model(name)),
    )
    caches = [graphed.new_cache(1, 8), reference.new_cache(1, 8)]
    sizes = []
    for i, token in enumerate(prompts(30, seed=2)[0].tolist()):
        rows = Rows.causal(0, i, 1)
        got, expected = (
            forward(graphed, [token], rows, caches[0]),
            forward(reference, [token], rows, caches[1]),
        )
        torch.testing.assert_close(got, expected, **CLOSE)
        sizes.append((caches[0].capacity, tape_of(graphed).captured))
    # Two pieces for each 8 slots attended; growth at 8 and 16 also starts from nothing.
    assert graphed.graph_fallback is None
    assert (
        sizes[7] == (8, 2) and sizes[8] == (16, 4) and sizes[16] == (32, 6) and sizes[29] == (32, 8)
    )


@pytest.mark.parametrize("lengths", [(7,), (3, 9, 1, 6)], ids=["one", "four"])
@pytest.mark.parametrize("recorder", [TapeRecorder, EagerRecorder])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "qwen3"])
def test_greedy_tokens_equal_generate(
    name: str, recorder: type[TapeRecorder] | type[EagerRecorder], lengths: tuple[int, ...]
) -> None:
    model, texts = tiny_model(name), prompts(*lengths, seed=4)
    width = max(lengths)
    padded = torch.stack(
        [torch.cat([torch.zeros(width - len(t), dtype=torch.long), t]) for t in texts]
    )
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    expected = model.generate(padded, attention_mask=mask, max_new_tokens=12, do_sample=False)[
        :, width:
    ].tolist()
    decoder = GraphedDecoder(model, recorder())
    for _ in range(2):
        out = generate(
            decoder, PlainStep(), [t.tolist() for t in texts], stop=StopSettings(max_new_tokens=12)
        )
        assert [list(s) for s in out.sequences] == expected
    assert decoder.graph_fallback is None
    if recorder is TapeRecorder:
        assert tape_of(decoder).captured <= 2 and tape_of(decoder).replayed >= 22


def test_captures_outlive_a_generation_and_go_with_their_cache() -> None:
    graphed = GraphedDecoder(tiny_model("llama"), TapeRecorder())
    tape = tape_of(graphed)

    def step(cache: KVCache) -> torch.Tensor:
        return forward(graphed, [5], Rows.causal(0, 0, 1), cache)

    first = graphed.new_cache(1, 20)
    expected = step(first)
    assert isinstance(first, StaticKVCache) and tape.captured == 2
    storage = first.storage
    del first
    again = graphed.new_cache(1, 30)
    assert isinstance(again, StaticKVCache) and again.storage is storage
    assert (
        again.lengths == [0] and not any(t.any() for t in again.keys) and not again.positions.any()
    )
    torch.testing.assert_close(step(again), expected, **CLOSE)
    assert tape.captured == 2
    # A second living cache has tensors, and captures, of its own; so has one of another size or
    # batch.
    second = graphed.new_cache(1, 30)
    torch.testing.assert_close(step(second), expected, **CLOSE)
    assert (
        isinstance(second, StaticKVCache) and second.storage is not storage and tape.captured == 4
    )
    del second
    assert graphed.new_cache(1, LEAST_CAPACITY + 1).capacity == 2 * LEAST_CAPACITY
    assert graphed.new_cache(3, 1).keys[0].shape[0] == 3
    step(again)
    assert tape.captured == 4


def test_generations_of_many_lengths_and_methods_share_captures() -> None:
    """What a method keeps for a next turn does not make the others record anew."""
    model = tiny_model("llama")
    decoder = GraphedDecoder(model, EagerRecorder())
    engine, tape = Engine(model, decoder, None, "hf"), TapeRecorder()
    decoder.recorder = tape

    def round_of_generations() -> None:
        for length in (40, 9, 70):
            for method in ("autoregressive", "layerskip:exit_layer=1:tokens=2"):
                stop = StopSettings(max_new_tokens=12)
                (text,) = prompts(length, seed=length)
                engine.generate([text.tolist()], stop=stop, method=method, speculate="always")

    round_of_generations()
    captured = tape.captured
    round_of_generations()
    assert captured and tape.captured == captured


def test_least_recently_used_captures_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_CAPTURES", 2)
    graphed = GraphedDecoder(tiny_model("llama"), TapeRecorder())
    cache, tape = graphed.new_cache(1, 8), tape_of(graphed)

    def step(start: int) -> None:
        graphed.layers(torch.ones(1, 32), Rows.causal(0, 0, 1), start, start + 1, cache)

    for start, captured in ((0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4)):
        step(start)
        assert tape.captured == captured


def test_calls_without_a_static_shape_run_as_before() -> None:
    graphed, reference = (
        GraphedDecoder(tiny_model("llama"), TapeRecorder()),
        HFDecoder(tiny_model("llama")),
    )
    caches = [graphed.new_cache(1, 80), reference.new_cache(1, 80)]
    (ids,), rows = prompts(70), Rows.causal(0, 0, 70)
    got, expected = (
        forward(d, ids.tolist(), rows, c) for d, c in zip((graphed, reference), caches, strict=True)
    )
    assert torch.equal(got, expected)
    plain = reference.new_cache(1, 8)  # somebody else's cache has no scratch slot
    assert torch.isfinite(forward(graphed, [5], Rows.causal(0, 0, 1), plain)).all()
    assert tape_of(graphed).captured == 0
    with pytest.raises(ValueError, match="rows look at"):
        hidden = Rows(np.zeros(1), -np.ones(1), np.zeros(1), np.full(1, 9999), np.zeros(1))
        graphed.layers(torch.ones(1, 32), hidden, 0, 1, caches[0])
    with pytest.raises(ValueError, match="2 rows but rows describes 1"):
        graphed.layers(torch.ones(2, 32), Rows.causal(0, 0, 1), 0, 1, caches[0])


@pytest.mark.parametrize("name", sorted(MOE))
def test_experts_fall_back_with_the_reason(name: str) -> None:
    graphed, reference = pair(name)
    rows = Rows.causal(0, 0, 5)
    ids = prompts(5)[0].tolist()
    got, expected = (forward(d, ids, rows, d.new_cache(1, 8)) for d in (graphed, reference))
    assert torch.equal(got, expected) and tape_of(graphed).captured == 0
    assert graphed.graph_fallback is not None and "experts" in graphed.graph_fallback


def test_a_pass_that_reads_the_device_falls_back_once() -> None:
    """An adapter that looks at its values cannot be captured: the capture's error is kept, the text
    is not touched.
    """

    class Looking(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum().item() > 0 else x * 3

    class Adapter:
        def deltas(self) -> dict[str, torch.nn.Module]:
            return {"mlp": Looking()}

    graphed, reference = (
        GraphedDecoder(tiny_model("llama"), TapeRecorder()),
        HFDecoder(tiny_model("llama")),
    )
    rows, x = Rows.concat([Rows.causal(0, 0, 2), Rows.accelerated_at(0, [1])]), torch.randn(3, 32)
    cache, other = graphed.new_cache(1, 8), reference.new_cache(1, 8)
    for _ in range(3):
        assert torch.equal(
            graphed.layers(x, rows, 0, 3, cache, {1: Adapter()}),
            reference.layers(x, rows, 0, 3, other, {1: Adapter()}),
        )
    assert tape_of(graphed).captured == 1
    assert (
        graphed.graph_fallback is not None
        and "not permitted when stream is capturing" in graphed.graph_fallback
    )
    assert type(graphed.new_cache(1, 8)) is KVCache


def test_a_capture_that_gives_other_numbers_is_not_used() -> None:
    class Wrong(EagerRecorder):
        def capture(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
            return lambda: function() * 1.01

    graphed, reference = (
        GraphedDecoder(tiny_model("llama"), Wrong()),
        HFDecoder(tiny_model("llama")),
    )
    cache, other = graphed.new_cache(1, 8), reference.new_cache(1, 8)
    for i in range(2):
        rows = Rows.causal(0, i, 1)
        assert torch.equal(forward(graphed, [7], rows, cache), forward(reference, [7], rows, other))
    assert (
        graphed.graph_fallback is not None
        and "relative difference 1.0e-02" in graphed.graph_fallback
    )


def test_a_capture_that_gives_no_numbers_is_not_used() -> None:
    class Broken(EagerRecorder):
        def capture(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
            return lambda: function() * torch.nan

    graphed = GraphedDecoder(tiny_model("llama"), Broken())
    assert not forward(graphed, [7], Rows.causal(0, 0, 1), graphed.new_cache(1, 8)).isnan().any()
    assert graphed.graph_fallback is not None and "nan" in graphed.graph_fallback


def test_what_is_rounding_is_no_disagreement() -> None:
    """Weights so large that attention is all or nothing: a rounding decides which."""
    model = copy.deepcopy(tiny_model("llama")).to(torch.bfloat16)  # tests share the model
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight *= 30
    differing: list[float] = []
    measure = cuda_graphs.relative_difference

    def noted(got: torch.Tensor, expected: torch.Tensor) -> float:
        differing.append(measure(got, expected))
        return differing[-1]

    graphed = GraphedDecoder(model, EagerRecorder())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cuda_graphs, "relative_difference", noted)
        for seed in range(8):
            draw = torch.Generator().manual_seed(seed)
            rows, ids = Rows.causal(0, 0, 33), torch.randint(VOCAB, (33,), generator=draw).tolist()
            # a run is not to differ from the next one because it was the first
            found = []
            for _ in range(2):
                before, cache = len(differing), graphed.new_cache(1, 64)
                hidden = forward(graphed, ids, rows, cache)
                found.append([hidden, *(keys[:, :, :33].clone() for keys in cache.keys)])
                graphed.release_cache(cache)
            assert graphed.graph_fallback is None
            assert len(differing) == before, "captured anew: the test shows nothing"
            assert all(map(torch.equal, *found))
            graphed._storages.clear()
    assert max(differing) > 3e-2, "no difference above the limit: the test shows nothing"


def test_cuda_models_get_the_graphed_decoder() -> None:
    assert own_layers_decoder(torch.device("cuda")) is GraphedDecoder
    assert own_layers_decoder(torch.device("cpu")) is HFDecoder


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "qwen3"])
def test_on_cuda_greedy_tokens_equal_generate(name: str) -> None:
    import copy

    model, (text,) = copy.deepcopy(tiny_model(name)).cuda(), prompts(7, seed=4)
    expected = model.generate(text[None].cuda(), max_new_tokens=12, do_sample=False)[0, 7:].tolist()
    decoder = GraphedDecoder(model)
    for _ in range(2):
        out = generate(decoder, PlainStep(), [text.tolist()], stop=StopSettings(max_new_tokens=12))
        assert list(out.sequences[0]) == expected
    assert decoder.graph_fallback is None


def test_a_dropped_decoder_and_cache_leave_no_storage() -> None:
    import weakref

    graphed = GraphedDecoder(tiny_model("llama"), EagerRecorder())
    cache = graphed.new_cache(1, 8)
    forward(graphed, [5], Rows.causal(0, 0, 1), cache)
    assert isinstance(cache, StaticKVCache)
    keys = weakref.ref(cache.storage.keys[0])
    gc.disable()  # no circle may hold the memory until a collection
    try:
        del cache, graphed
        assert keys() is None
    finally:
        gc.enable()


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(SOME), st.integers(1, 3), st.data())
def test_whole_passes_equal_those_without_captures(
    name: str, batch: int, data: st.DataObject
) -> None:
    """From tokens or from residuals, with and without taps, to the tokens that come next."""
    graphed, reference = pair(name)
    decoders, total = (graphed, reference), graphed.info.num_layers
    caches = [decoder.new_cache(batch, 4) for decoder in decoders]
    for _ in range(data.draw(st.integers(1, 4))):
        seqs = data.draw(st.sets(st.integers(0, batch - 1), min_size=1))
        parts = [
            Rows.causal(b, caches[0].lengths[b], data.draw(st.integers(1, 5))) for b in sorted(seqs)
        ]
        rows, first = Rows.concat(parts), data.draw(st.integers(0, total - 1))
        ids = [data.draw(st.integers(2, VOCAB - 1)) for _ in range(len(rows))]
        taps = data.draw(st.sets(st.integers(first, total)))
        found = []
        for decoder, cache in zip(decoders, caches, strict=True):
            direct = decoder.next_tokens(rows, cache, ids)
            entering = decoder.first_layers(ids, rows, first, cache)
            hidden, inner = decoder.layers_with_taps(
                entering, rows, first, total, cache, sorted(taps)
            )
            assert set(inner) == taps
            after = decoder.next_tokens(rows, cache, x=entering, start=first)
            assert direct[1] == after[1] and len(direct[1]) == len(rows)
            found.append([direct[0], after[0], entering, hidden, *(inner[t] for t in sorted(taps))])
            found[-1].append(decoder.logits(direct[0])[range(len(rows)), direct[1]])
            for part in parts:
                cache.commit(int(part.seq[0]), len(part))
        for got, expected in zip(*found, strict=True):
            torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
    assert graphed.graph_fallback is None


def test_a_capture_that_chooses_other_tokens_is_not_used() -> None:
    class Wrong(EagerRecorder):
        def capture(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
            def replay() -> torch.Tensor:
                out = function()
                if function.run.chooses:  # type: ignore[attr-defined]
                    function.inputs.chosen += 1  # type: ignore[attr-defined]
                return out

            return replay

    graphed, reference = (
        GraphedDecoder(tiny_model("llama"), Wrong()),
        HFDecoder(tiny_model("llama")),
    )
    cache, other = graphed.new_cache(1, 8), reference.new_cache(1, 8)
    for i in range(2):
        rows = Rows.causal(0, i, 1)
        got, expected = (
            graphed.next_tokens(rows, cache, [7]),
            reference.next_tokens(rows, other, [7]),
        )
        assert got[1] == expected[1] and torch.equal(got[0], expected[0])
    assert graphed.graph_fallback is not None and "other tokens" in graphed.graph_fallback


def test_plain_decoding_asks_the_device_for_one_thing_a_token() -> None:
    tape = TapeRecorder()
    graphed = GraphedDecoder(tiny_model("llama"), tape)
    cache = graphed.new_cache(1, 8)
    for i in range(4):
        graphed.next_tokens(Rows.causal(0, i, 1), cache, [5])
    assert (tape.captured, tape.replayed) == (1, 1 + 4)  # once more to be compared


def test_an_accepted_path_moves_in_all_layers_at_once() -> None:
    """One block of a model's layers, or several where their shapes differ."""
    for shapes in ([(2, 4, 4)] * 3, [(2, 4, 4), (1, 8, 4), (2, 4, 4)]):
        layout = [LayerKV(*shape, torch.float32, torch.device("cpu")) for shape in shapes]
        cache = StaticKVCache(2, 16, layout)
        assert len(cache.storage.blocks) == len(
            {d for h, *ds in shapes for d in ((h, s) for s in ds)}
        )
        for tensor in cache.keys + cache.values:
            tensor.normal_()
        before = [tensor.clone() for tensor in cache.keys + cache.values]
        cache.lengths = [0, 3]
        cache.keep(1, [3, 5, 9])
        for now, old in zip(cache.keys + cache.values, before, strict=True):
            assert torch.equal(now[1, :, 3:6], old[1, :, [3, 5, 9]]) and torch.equal(now[0], old[0])
        assert cache.lengths == [0, 6]
