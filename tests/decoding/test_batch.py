"""Sequences that come and go: each text is what its prompt gives alone, whoever else is there,
however it is read, drafted and sampled, and wherever its beginning was kept.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import psutil
import pytest
import torch
from native_kernel import skip_without_kernel

import multirate
from multirate.decoding.batch import Batch, Joining
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.prefix_tree import BLOCK, PrefixTree
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings
from multirate.engine import Engine
from multirate.errors import UserError
from multirate.loading.hub import load_model

GREEDY = SamplingSettings()
SETTINGS = [
    GREEDY,
    SamplingSettings(1.0, seed=3),
    SamplingSettings(0.7, seed=4),
    SamplingSettings(1.0, top_p=0.8, seed=5),
    SamplingSettings(0.9, top_k=5, min_p=0.05, seed=6),
    SamplingSettings(repetition_penalty=1.3),
    SamplingSettings(1.0, repetition_penalty=1.2, seed=7),
]


@cache
def engine() -> Engine:
    skip_without_kernel()
    made = multirate.attach("tiny", backend="native")
    made.add("m2r2-carry")
    return made


def step_of(method: str) -> Step:
    if method == "autoregressive":
        return PlainStep()
    with engine().stepping(method, "always") as (_, step):
        return step


METHODS = ["autoregressive", "sam", "m2r2-carry", "m2r2-carry:lookup=0:window=8"]


@cache
def prompts() -> list[list[int]]:
    """Some begin alike, some repeat themselves, and one is one token."""
    rng = random.Random(1)
    vocab = engine().decoder.info.vocab_size
    common = [rng.randrange(3, vocab) for _ in range(40)]
    made = [[*common[: rng.randrange(1, 40)], rng.randrange(3, vocab)] for _ in range(8)]
    made += [[rng.randrange(3, vocab) for _ in range(rng.randrange(1, 60))] for _ in range(8)]
    made += [common * 2, [*common, *common[:20]], [5, 6, 7] * 9, [9]]
    return made


@cache
def alone(prompt: int, settings: int, length: int) -> tuple[int, ...]:
    """What plain decoding gives for the prompt alone."""
    stop = StopSettings(length)
    out = generate(engine().decoder, PlainStep(), [prompts()[prompt]], SETTINGS[settings], stop)
    return tuple(out.sequences[0])


def run(
    batch: Batch, requests: Sequence[tuple[int, int, int]], rng: random.Random, **options: Any
) -> dict[int, tuple[int, ...]]:
    """Serves (prompt, settings, length) in random company → the texts by request."""
    waiting, going, texts = list(enumerate(requests)), dict[int, int](), {}
    while waiting or going:
        while waiting and batch.free and rng.random() < 0.5:
            number, (prompt, settings, length) = waiting.pop(0)
            joining = Joining(
                prompts()[prompt],
                sampling=SETTINGS[settings],
                stop=StopSettings(length),
                most_drafted=rng.choice([None, None, 0, 1, 3]),
                similar=prompts()[rng.randrange(len(prompts()))] if rng.random() < 0.3 else (),
                **options,
            )
            going[batch.join(joining)[0]] = number
        batch.read(rng.choice([1, 7, 16, 100]))
        if batch.session.active:
            batch.advance()
        for seq in batch.ended:
            texts[going.pop(seq)] = tuple(batch.session.stops.new_tokens[seq])
            batch.leave(seq)
        if going and rng.random() < 0.05:  # somebody gives up
            seq = rng.choice(list(going))
            del going[seq]
            batch.leave(seq)
    return texts


@pytest.mark.parametrize("kept", [0, 1 << 20])
@pytest.mark.parametrize("method", METHODS)
def test_a_text_depends_on_nothing_but_its_request(method: str, kept: int) -> None:
    rng = random.Random(f"{method} {kept}")
    batch = Batch(engine().decoder, step_of(method), 5, keep_bytes=kept)
    requests = [
        (
            rng.randrange(len(prompts())),
            rng.randrange(len(SETTINGS)),
            rng.choice([0, 1, 2, 9, 30]),
        )
        for _ in range(60)
    ]
    texts = run(batch, requests, rng)
    assert len(texts) > 40
    for number, text in texts.items():
        assert text == alone(*requests[number]), requests[number]
    if kept:
        assert batch.kept is not None and 0 < batch.kept.nbytes <= kept
    stats = batch.session.stats
    assert stats.accepted > 0 or method == "autoregressive"
    assert not batch.reading and not batch.session.active and batch.free == 5


@pytest.mark.parametrize("method", METHODS[:3])
def test_so_it_is_where_torch_runs_the_model_and_the_drafts(method: str) -> None:
    made = multirate.attach(load_model("tiny", "float32"), backend="hf")
    made.add("m2r2-carry")
    step: Step = PlainStep()
    if method != "autoregressive":
        with made.stepping(method, "always") as (_, step):
            pass
    rng = random.Random(method)
    batch = Batch(made.decoder, step, 4, keep_bytes=1 << 20)
    requests = [(rng.randrange(len(prompts())), rng.randrange(4), 8) for _ in range(16)]
    for number, text in run(batch, requests, rng).items():
        prompt, settings, length = requests[number]
        stop = StopSettings(length)
        own = generate(made.decoder, PlainStep(), [prompts()[prompt]], SETTINGS[settings], stop)
        assert text == tuple(own.sequences[0])
    assert batch.kept is not None and batch.kept.nbytes > 0
    assert batch.session.stats.accepted > 0 or method == "autoregressive"


def test_kept_beginnings_are_not_read_again() -> None:
    batch = Batch(engine().decoder, step_of("m2r2-carry"), 2, keep_bytes=1 << 20)
    prompt = prompts()[16]
    stop = StopSettings(8)
    seq, kept = batch.join(Joining(prompt, stop=stop))
    assert kept == 0
    batch.read(1000)
    other, kept = batch.join(Joining([*prompt, 3], stop=stop))  # while the first one decodes
    assert kept == len(prompt) // BLOCK * BLOCK - 1
    assert batch.read(1000) == [other]
    while batch.session.active:
        batch.advance()
    first = batch.session.sampler.tokens[seq]
    batch.leave(seq)
    _, kept = batch.join(Joining([*first, 4, 5], stop=stop))  # a next turn
    assert kept >= len(first) // BLOCK * BLOCK - BLOCK - 1


def test_the_branch_has_its_own_keys_and_values_after_a_kept_beginning() -> None:
    """They come back with the model's, although another text was in their place meanwhile."""
    prompt = prompts()[16]
    known = list[torch.Tensor]()
    batch = Batch(engine().decoder, step_of("m2r2-carry:lookup=0"), 1, keep_bytes=1 << 20)
    for text in (prompt, [5] * 100, prompt):
        seq, kept = batch.join(Joining(text, stop=StopSettings(20)))
        batch.read(1000)
        while batch.session.active:
            batch.advance()
        known.append(batch.step.caches()[0].standard(0)[0][seq, :, : len(prompt)].clone())
        batch.leave(seq)
    assert kept > 60
    assert torch.equal(known[0], known[2]) and not torch.equal(known[0], known[1])


def test_the_memory_of_kept_beginnings_is_bounded_and_the_oldest_go_first() -> None:
    decoder = engine().decoder
    cache = decoder.new_cache(1, 128)
    tree = PrefixTree([cache], 0)
    assert tree.most == 0
    tree.keep(0, list(range(64)))
    assert tree.shared(list(range(64))) == 0
    tree = PrefixTree([cache], 4 * tree.block_bytes)
    texts = [[n] * 40 for n in range(5)]
    for text in texts[:2]:
        tree.keep(0, text)
    assert tree.shared(texts[0]) == tree.shared(texts[1]) == 2 * BLOCK
    assert tree.restore(0, texts[0]) == 2 * BLOCK  # now the other one is older
    tree.keep(0, texts[2][:BLOCK])
    assert tree.shared(texts[0]) == 2 * BLOCK
    assert tree.shared(texts[1]) == BLOCK  # its end went first
    tree.keep(0, [7] * 200)  # more than there is room for
    assert tree.shared([7] * 200) == 4 * BLOCK
    assert tree.nbytes == 4 * tree.block_bytes
    assert not any(map(tree.shared, texts))


@pytest.mark.parametrize("method", METHODS[:3])
def test_kept_keys_and_values_are_those_of_a_prefill(method: str) -> None:
    decoder = engine().decoder
    batch = Batch(decoder, step_of(method), 3, keep_bytes=1 << 20)
    run(batch, [(n % 20, n % len(SETTINGS), 25) for n in range(30)], random.Random(2))
    text = (prompts()[16] * 3)[:70]
    kept = batch.kept
    assert kept is not None
    count = kept.restore(0, text)
    assert count >= 3 * BLOCK
    fresh = Batch(decoder, PlainStep(), 1)
    fresh.join(Joining(text[:count], stop=StopSettings(1)))
    fresh.read(1000)
    for layer in range(decoder.info.num_layers):
        for one, other in zip(
            batch.session.cache.standard(layer), fresh.session.cache.standard(layer), strict=True
        ):
            assert torch.equal(one[0, :, :count], other[0, :, :count])


def test_room_for_long_texts_takes_no_memory_and_used_room_is_given_back() -> None:
    decoder, process = engine().decoder, psutil.Process()
    slots = 4096
    many = (4 << 30) // (slots * decoder.new_cache(1, 16).token_bytes)
    before = process.memory_info().rss
    cache = decoder.new_cache(many, slots)
    assert cache.nbytes() > 3 << 30 and cache.comes_as_used
    assert process.memory_info().rss - before < 50 << 20
    for seq in range(many // 8):
        for view in cache.block_views(BLOCK):
            view[seq].fill_(1.0)
    assert process.memory_info().rss - before > 400 << 20
    for seq in range(many // 8):
        cache.trim(seq)
    assert process.memory_info().rss - before < 100 << 20


def test_a_place_stays_free_after_a_prompt_that_cannot_be_used() -> None:
    batch = Batch(engine().decoder, PlainStep(), 1)
    for prompt in ([], [-1], [engine().decoder.info.vocab_size]):
        with pytest.raises(UserError, match="prompt 0"):
            batch.join(Joining(prompt))
        assert batch.free == 1
    batch.join(Joining([5], stop=StopSettings(2)))
    assert batch.free == 0


def test_who_looks_at_logits_sees_each_emitted_token_once() -> None:
    batch, seen = Batch(engine().decoder, step_of("sam"), 2), list[int]()
    read: list[torch.Tensor] = []

    def observe(logits: torch.Tensor, token: int) -> None:
        assert logits.shape == (engine().decoder.info.vocab_size,)
        assert token == int(logits.argmax())
        seen.append(token)

    seq, _ = batch.join(
        Joining(
            [5, 6, 7] * 5,
            stop=StopSettings(20),
            observe=observe,
            on_prompt=lambda first, hidden: read.append(hidden),
        )
    )
    other, _ = batch.join(Joining([5, 6, 7] * 5, stop=StopSettings(20)))
    while batch.reading:
        batch.read(4)
    while batch.session.active:
        batch.advance()
    new = batch.session.stops.new_tokens
    assert seen[:20] == new[seq] == new[other] and len(seen) < 20 + 8
    assert sum(map(len, read)) == 15
