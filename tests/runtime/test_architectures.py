"""Every architecture: our rows through its own layers against its own forward and its own
`generate`, in float32.
"""

from __future__ import annotations

import pytest
import torch
from traces import trace

from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.kv_cache import KVCache
from multirate.runtime.rows import Rows

from .tiny_models import MOE, NAMES, VOCAB, WINDOW, WINDOWED, prompts, tiny_model

NEW_TOKENS = 10


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(
    decoder: HFDecoder, ids: list[torch.Tensor], starts: list[int], cache: KVCache, seqs=None
) -> torch.Tensor:
    """Appends ids[b] to sequence b at slots starts[b]...; logits of all rows."""
    seqs = range(len(ids)) if seqs is None else seqs
    rows = Rows.concat(
        [Rows.causal(b, s, len(x)) for b, s, x in zip(seqs, starts, ids, strict=True)]
    )
    x = decoder.embed(torch.cat(ids), rows.pos)
    return decoder.logits(decoder.layers(x, rows, 0, decoder.info.num_layers, cache))


def greedy(decoder: HFDecoder, ids: list[torch.Tensor], count: int) -> list[list[int]]:
    cache = decoder.new_cache(len(ids), 8)
    lengths = [len(x) for x in ids]
    logits = run(decoder, ids, [0] * len(ids), cache)
    last = torch.tensor(lengths).cumsum(0) - 1
    out: list[list[int]] = [[] for _ in ids]
    tokens = logits[last].argmax(-1)
    for step in range(count):
        for b, token in enumerate(tokens.tolist()):
            out[b].append(token)
        if step + 1 < count:
            logits = run(decoder, list(tokens[:, None]), [n + step for n in lengths], cache)
            tokens = logits.argmax(-1)
    return out


@torch.no_grad()
def test_logits_equal_the_models_own_forward(name: str) -> None:
    model, decoder = tiny_model(name), HFDecoder(tiny_model(name))
    (ids,) = prompts(23)
    expected = model(ids[None]).logits[0]
    got = run(decoder, [ids], [0], decoder.new_cache(1, 32))
    assert (
        expected.std() > 0.1 and len(set(expected.argmax(-1).tolist())) > 3
    )  # logits that can tell models apart
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_window_is_the_models_own(name: str) -> None:
    """The first token beyond every window no longer matters exactly where the model itself has
    windows only.
    """
    decoder = HFDecoder(tiny_model(name))
    windows = decoder.info.windows
    assert (WINDOW in windows) == (name in WINDOWED)
    assert set(windows) <= {WINDOW, None}


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(12,), (13, 4, 9, 1)])
def test_greedy_tokens_equal_generate(name: str, lengths: tuple[int, ...]) -> None:
    """Batches go to `generate` left-padded; ours starts each sequence at slot 0."""
    model, decoder = tiny_model(name), HFDecoder(tiny_model(name))
    ids = prompts(*lengths, seed=4)
    width = max(lengths)
    padded = torch.stack(
        [torch.cat([torch.zeros(width - len(x), dtype=torch.long), x]) for x in ids]
    )
    mask = torch.stack([torch.arange(width) >= width - len(x) for x in ids]).long()
    settings = {
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    expected = model.generate(padded, attention_mask=mask, **settings)[:, width:].tolist()
    assert greedy(decoder, ids, NEW_TOKENS) == expected
    assert len({token for row in expected for token in row}) > 2  # a text that could go wrong


@torch.no_grad()
def test_chunks_pieces_and_batches_equal_one_shot(name: str) -> None:
    """Chunked prefill, layers run in two pieces and ragged batches all give the one-shot logits."""
    decoder = HFDecoder(tiny_model(name))
    a, b, c = prompts(17, 9, 3, seed=5)
    whole = [run(decoder, [x], [0], decoder.new_cache(1, 32)) for x in (a, b, c)]

    cache = decoder.new_cache(1, 2)  # grows on the way
    chunks = [run(decoder, [a[s:e]], [s], cache) for s, e in ((0, 5), (5, 6), (6, 17))]
    torch.testing.assert_close(torch.cat(chunks), whole[0], atol=5e-5, rtol=1e-5)

    rows = Rows.causal(0, 0, 17)
    cache, total = decoder.new_cache(1, 32), decoder.info.num_layers
    x = decoder.layers(decoder.embed(a, rows.pos), rows, 0, 1, cache)
    x = decoder.layers(decoder.layers(x, rows, 1, 2, cache), rows, 2, total, cache)
    torch.testing.assert_close(decoder.logits(x), whole[0], atol=5e-5, rtol=1e-5)

    # Sequences 5 and 0 of a batch of 7, together and in any order: most of the range between them
    # is absent.
    cache = decoder.new_cache(7, 32)
    batch = run(decoder, [a, c, b], [0, 0, 0], cache, seqs=[5, 0, 3])
    torch.testing.assert_close(
        batch, torch.cat([whole[0], whole[2], whole[1]]), atol=5e-5, rtol=1e-5
    )
    more = run(
        decoder, [a[:2], c[:1]], [9, 3], cache, seqs=[3, 0]
    )  # dense range with an absent sequence
    fresh = run(
        decoder, [torch.cat([b, a[:2]]), torch.cat([c, c[:1]])], [0, 0], decoder.new_cache(2, 32)
    )
    torch.testing.assert_close(more, fresh[[9, 10, 14]], atol=5e-5, rtol=1e-5)


def test_model_is_left_as_it_was(name: str) -> None:
    """Neither weights, modes nor the configuration change."""
    model = tiny_model(name)
    before = (
        model.config.to_dict(),
        model.config._attn_implementation,
        [m.training for m in model.modules()],
    )
    hooks = [len(m._forward_hooks) for m in model.modules()]
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    run(HFDecoder(model), prompts(5), [0], HFDecoder(model).new_cache(1, 8))
    after = (
        model.config.to_dict(),
        model.config._attn_implementation,
        [m.training for m in model.modules()],
    )
    assert before == after
    assert hooks == [len(m._forward_hooks) for m in model.modules()]
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())


def test_training_mode_has_no_dropout_and_is_restored() -> None:
    model = tiny_model("gpt2")
    decoder, (ids,) = HFDecoder(model), prompts(7)
    quiet = run(decoder, [ids], [0], decoder.new_cache(1, 8))
    model.train()
    try:
        noisy = run(decoder, [ids], [0], decoder.new_cache(1, 8))
        assert model.training and model.transformer.h[1].attn.attn_dropout.training
    finally:
        model.eval()
    torch.testing.assert_close(noisy, quiet)


def test_experts_are_exposed(name: str) -> None:
    decoder = HFDecoder(tiny_model(name))
    parts = decoder.parts
    if name not in MOE:
        assert decoder.info.num_experts == 0 and parts.moe == (None, None, None)
        return
    assert (decoder.info.num_experts, decoder.info.experts_per_token) == (5, 2)
    for layer, moe in zip(parts.layers, parts.moe, strict=True):
        if name == "qwen3_moe" and layer.index == 1:
            assert moe is None and {"gate", "up", "down"} <= set(layer.sites)
            continue
        assert moe is not None and moe.router is not None and moe.num_experts == 5
        assert moe.experts.down_proj.shape[0] == 5
        router_weight = moe.router.weight
        assert router_weight.shape == (5, 32)


@torch.no_grad()
def test_trace_equals_the_models_hidden_states(name: str) -> None:
    """A pass layer by layer against `output_hidden_states`."""
    model, parts = tiny_model(name), HFDecoder(tiny_model(name)).parts
    ids = torch.stack(prompts(14, 14, seed=8))
    states = model(ids, output_hidden_states=True)
    hidden, cache = trace(parts, ids)
    for i in range(len(parts.layers)):  # the last entry of hidden_states is after the final norm
        torch.testing.assert_close(hidden[i], states.hidden_states[i], atol=5e-5, rtol=1e-5)
    torch.testing.assert_close(parts.logits(hidden[-1]), states.logits, atol=5e-5, rtol=1e-5)
    assert cache.keys[0].shape[2] == 14 and states.logits.shape[-1] == VOCAB
