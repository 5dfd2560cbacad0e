"""Look-ups, draft trees and whole speculative steps (csrc/lookup.c, automaton.c, draft.c,
speculative.c) against Python.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.acceptance import accept_greedy
from multirate.decoding.speculate.acceptance_statistics import ContinuationRates
from multirate.decoding.speculate.drafter import Draft
from multirate.decoding.speculate.ngram import TextIndex
from multirate.decoding.speculate.suffix_automaton import SuffixAutomaton
from multirate.decoding.speculate.text_source import TextSource
from multirate.errors import UserError
from multirate.methods._shared.draft_tree import DraftTree
from multirate.runtime.draft_branch import BranchHead
from multirate.runtime.fused import DraftShape, Growth, Lookups
from multirate.runtime.native import NativeDecoder, abi, library
from multirate.runtime.native.cache import NativeKVCache
from multirate.runtime.native.draft_head import DraftHead
from multirate.runtime.native.fused_steps import FusedSteps, run_together
from multirate.runtime.native.packing import Owner
from multirate.runtime.rows import Rows

from .harness import embedding_of

VOCAB, EXIT = 61, 1


def make_decoder() -> NativeDecoder:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return NativeDecoder(model.to(torch.bfloat16))


@pytest.mark.parametrize("seed", range(4))
def test_ngram_look_up_is_text_indexs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(60):
        longest, most = int(rng.integers(1, 6)), int(rng.integers(1, 9))
        text = rng.integers(0, int(rng.integers(2, 6)), int(rng.integers(2, 40))).astype(np.int32)
        drafted = rng.integers(0, 3, int(rng.integers(0, 4))).astype(np.int32)
        expected, length = TextIndex(longest).look_up(text.tolist(), most, drafted.tolist())
        whole, found = np.concatenate([text, drafted]), np.zeros(most, np.int64)
        matched = library.kernel().mr_ngram(
            abi.ints(whole), len(text) - 1, len(whole), longest, most, abi.longs(found)
        )
        assert matched == length
        assert not length or found.tolist() == expected


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), max_size=5),
    st.integers(1, 12),
    st.integers(0, 40),
)
def test_an_automaton_finds_what_suffix_automaton_does(
    pieces: list[list[int]], drafted: list[int], most: int, longest: int
) -> None:
    """As the text grows, tokens far apart among them (a hash table's slots are shared)."""
    kernel, count = library.kernel(), sum(map(len, pieces))
    memory = np.full(kernel.mr_automaton_words(count), 77, np.int32)
    automaton = abi.new("Automaton", memory=abi.ints(memory), room=count)
    kernel.mr_automaton_clear(automaton)
    whole = np.zeros(count + len(drafted), np.int32)
    text = abi.new("Text", tokens=abi.ints(whole), automaton=automaton)
    found, reference, read = np.zeros(most, np.int64), SuffixAutomaton(longest), []
    for piece in pieces:
        read += [token << 14 for token in piece]
        after = [token << 14 for token in drafted]
        whole[: len(read) + len(after)] = read + after
        text.count = len(read)
        expected, length = reference.look_up(read, most, after)
        assert kernel.mr_look_up(text, len(after), longest, most, abi.longs(found)) == length
        assert not length or found.tolist() == expected


def test_an_automaton_has_room_for_any_text() -> None:
    """The texts with the most states and the most edges, and others, up to their last token."""
    kernel, rng = library.kernel(), np.random.default_rng(0)
    for count in (1, 2, 3, 7, 64, 500):
        for tokens in (
            [0] + [1] * (count - 1),  # most states
            [0, *[1] * (count - 2), 2][:count],  # most edges
            list(range(count)),
            rng.integers(0, 2, count).tolist(),
        ):
            words = kernel.mr_automaton_words(count)
            memory = np.full(words + 8, 77, np.int32)
            automaton = abi.new("Automaton", memory=abi.ints(memory), room=count)
            kernel.mr_automaton_clear(automaton)
            whole, found = np.array(tokens, np.int32), np.zeros(4, np.int64)
            text = abi.new("Text", tokens=abi.ints(whole), count=len(tokens), automaton=automaton)
            matched = kernel.mr_look_up(text, 0, 1000, 4, abi.longs(found))
            assert (memory[words:] == 77).all()
            assert matched == SuffixAutomaton(1000).look_up(tokens, 4)[1]


def first_layers(decoder: NativeDecoder) -> abi.CData:
    """A branch that is the model's first layers and nothing else."""
    return decoder.branch(exit_layer=EXIT)


def plain(decoder: NativeDecoder, prompt: list[int], count: int) -> list[int]:
    cache, tokens = decoder.new_cache(1, 128), list(prompt)
    entering = list(prompt)
    while len(tokens) < len(prompt) + count:
        rows = Rows.causal(0, cache.lengths[0], len(entering))
        _, chosen = decoder.next_tokens(rows, cache, entering)
        cache.commit(0, len(entering))
        entering = [chosen[-1]]
        tokens += entering
    return tokens[len(prompt) :]


def copying(nodes: int) -> DraftShape:
    """Drafts that are looked up, and nothing else."""
    return DraftShape(nodes, 0, 0, 0.0, 0.0, backfill=False)


def head_of(decoder: NativeDecoder) -> DraftHead:
    """The model's own."""
    return DraftHead(decoder, Owner(), BranchHead())


def start(decoder: NativeDecoder, prompt: list[int]) -> tuple[NativeKVCache, int]:
    """A cache with the prompt in it, and the first token."""
    cache = decoder.new_cache(1, 128)
    _, chosen = decoder.next_tokens(Rows.causal(0, 0, len(prompt)), cache, prompt)
    cache.commit(0, len(prompt))
    return cache, chosen[-1]


@pytest.mark.parametrize("source", [TextIndex, SuffixAutomaton])
def test_steps_that_only_look_the_text_up_emit_what_plain_decoding_does(
    source: type[TextSource],
) -> None:
    decoder, prompt = make_decoder(), [5, 6, 7, 8] * 6
    expected = plain(decoder, prompt, 40)
    cache, token = start(decoder, prompt)
    branch = decoder.branch()
    lookups, index = Lookups(3, source is SuffixAutomaton), source(3)
    steps = FusedSteps(decoder, branch, None, copying(6), lookups)
    steps.begin(cache, None)
    steps.enter(0, [token], text=[*prompt, token])
    emitted = [token]
    while len(emitted) < 40:
        draft = index.look_up([*prompt, *emitted], 6)[0]
        done = run_together([steps], [Growth(6)])[0]
        agreed = 0
        while agreed < len(draft) and draft[agreed] == done.tokens[agreed]:
            agreed += 1
        assert len(done.tokens) == agreed + 1
        assert done.drafted == len(draft)
        cache.commit(0, len(done.tokens))
        emitted += done.tokens
    assert emitted[:40] == expected


def tree_by_parts(
    decoder: NativeDecoder,
    prompt: list[int],
    token: int,
    depth: int,
    width: int,
    nodes: int,
    top: int,
    draft_threshold: float,
    verify_threshold: float,
    min_probability: float,
) -> tuple[list[int], list[int], list[int]]:
    """The same draft level by level: the first EXIT layers, then the head. → tokens, parents,
    emitted.
    """
    cache, _ = start(decoder, prompt)
    length, tree = len(prompt), DraftTree(depth)
    thresholds = np.full(nodes, draft_threshold), np.full(nodes, verify_threshold)

    def logits_of(ids: list[int], rows: Rows) -> torch.Tensor:
        x = decoder.embed(torch.tensor(ids), rows.pos)
        return decoder.layers(x, rows, 0, EXIT, cache)

    outputs = {0: logits_of([token], Rows.causal(0, length, 1))}
    frontier = [0]
    while frontier and depth:
        rows_of = torch.cat([outputs[node] for node in frontier])
        found, probs = head_of(decoder).top(rows_of, top)
        if min_probability:  # a chain: what is too unlikely ends it
            assert width == top == 1
            if probs[0][0] < min_probability:
                tree.grow(frontier, found, probs, 0, *thresholds)
                break
        frontier = tree.grow(
            frontier, found, probs, min(width, nodes - len(tree.tokens)), *thresholds
        )
        for node in frontier:
            rows = Rows(
                *([value] for value in (0, length + node, length + tree.depth[node], length + 1)),
                [tree.bits[node]],
            )
            outputs[node] = logits_of([tree.tokens[node - 1]], rows)
    tree.finish(thresholds[1])
    rows = Rows.draft_tree(0, length, tree.parents)
    _, target = decoder.next_tokens(rows, cache, [token, *tree.tokens])
    path = [0]
    for node in range(1, len(tree.tokens) + 1):
        if tree.parents[node - 1] == path[-1] and tree.tokens[node - 1] == target[path[-1]]:
            path.append(node)
    return tree.tokens, tree.parents, [target[node] for node in path]


@pytest.mark.parametrize(
    "settings",
    [
        dict(depth=4, width=1, nodes=4, top=1),
        dict(depth=4, width=1, nodes=6, top=1, min_probability=0.15),
        dict(depth=3, width=3, nodes=12, top=4),
        dict(depth=5, width=2, nodes=20, top=3, draft_threshold=0.02, verify_threshold=0.01),
        dict(depth=0, width=1, nodes=3, top=1),
    ],
)
def test_a_step_drafts_and_accepts_what_its_parts_do(settings: dict[str, float]) -> None:
    decoder = make_decoder()
    chosen: dict[str, float] = {
        "draft_threshold": 0.0,
        "verify_threshold": 0.0,
        "min_probability": 0.0,
        **settings,
    }
    nodes, depth, top = int(chosen["nodes"]), int(chosen["depth"]), int(chosen["top"])
    for prompt in ([3, 4, 5], list(range(10, 45))):
        cache, token = start(decoder, prompt)
        tokens, parents, emitted = tree_by_parts(
            decoder,
            prompt,
            token,
            depth,
            int(chosen["width"]),
            nodes,
            top,
            chosen["draft_threshold"],
            chosen["verify_threshold"],
            chosen["min_probability"],
        )
        branch = first_layers(decoder)
        least, width = chosen["min_probability"], int(chosen["width"])
        shape = DraftShape(nodes, width, top, 1.0, least, backfill=False)
        steps = FusedSteps(decoder, branch, head_of(decoder), shape, Lookups(0))
        steps.begin(cache, None)
        steps.enter(0, [token])
        growth = Growth(
            depth,
            np.full(nodes, chosen["draft_threshold"]),
            np.full(nodes, chosen["verify_threshold"]),
        )
        done = run_together([steps], [growth])[0]
        assert (steps.nodes().tokens, steps.nodes().parents) == (tokens, parents)
        assert done.tokens == emitted
        expected = plain(decoder, prompt, 1 + len(emitted))
        assert [token, *emitted] == expected


def drawn(decoder: NativeDecoder, prompt: list[int], count: int, sampler: Sampler) -> list[int]:
    """Plain decoding at the sampler's temperature → new tokens, which are added to its own."""
    cache, entering = decoder.new_cache(1, 128), list(prompt)
    for _ in range(count):
        rows = Rows.causal(0, cache.lengths[0], len(entering))
        noise = sampler.noises([0] * len(entering), [0] * len(entering))
        _, chosen = decoder.next_tokens(rows, cache, entering, noise=noise)
        cache.commit(0, len(entering))
        entering = [chosen[-1]]
        sampler.tokens[0] += entering
    return sampler.tokens[0][len(prompt) :]


@pytest.mark.parametrize("temperature", [0.4, 1.0])
def test_a_step_at_a_temperature_emits_what_plain_decoding_draws(temperature: float) -> None:
    decoder, prompt = make_decoder(), [5, 6, 7, 8] * 4
    settings = SamplingSettings(temperature, seed=9)
    expected = drawn(decoder, prompt, 40, Sampler(settings, [prompt]))
    sampler = Sampler(settings, [[*prompt, expected[0]]])
    cache, _ = start(decoder, prompt)
    branch = first_layers(decoder)
    shape = DraftShape(12, 2, 3, 1.0, 0.0, backfill=False)
    steps = FusedSteps(decoder, branch, head_of(decoder), shape, Lookups(0))
    steps.begin(cache, None, sampler)
    steps.enter(0, [expected[0]])
    accepted = 0
    while len(sampler.tokens[0]) < len(prompt) + 40:
        done = run_together([steps], [Growth(4)])[0]
        cache.commit(0, len(done.tokens))
        sampler.tokens[0] += done.tokens
        accepted += len(done.tokens) - 1
    assert sampler.tokens[0][len(prompt) :][:40] == expected
    assert accepted > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("by_match", [[-1] * 4, [-1, 0, 2, 5], [-1, 1, 1, 6]])
def test_drafts_of_stream_and_text_by_turns_emit_what_plain_decoding_does(
    by_match: list[int], temperature: float
) -> None:
    """by_match: for each length of the text's match how many tokens of it are the draft; -1: the
    branch drafts.
    """
    decoder, prompt = make_decoder(), [5, 6, 7, 8] * 4
    settings = SamplingSettings(temperature, seed=9)
    if temperature:
        expected = drawn(decoder, prompt, 60, Sampler(settings, [prompt]))
    else:
        expected = plain(decoder, prompt, 60)
    branch = first_layers(decoder)
    sampler = Sampler(settings, [[*prompt, expected[0]]])
    cache, _ = start(decoder, prompt)
    shape = DraftShape(9, 2, 3, 1.0, 0.0, backfill=False)
    steps = FusedSteps(decoder, branch, head_of(decoder), shape, Lookups(3))
    steps.begin(cache, None, sampler)
    steps.enter(0, [expected[0]], text=sampler.tokens[0])
    steps.learn_from(ContinuationRates(3))
    accepted = 0
    while len(sampler.tokens[0]) < len(prompt) + 50:
        copied = by_match[steps.look_up(1)[1]]
        growth = Growth(4, deepest=9) if copied < 0 else Growth(0, deepest=copied, own=False)
        done = run_together([steps], [growth])[0]
        cache.commit(0, len(done.tokens))
        sampler.tokens[0] += done.tokens
        draft = steps.nodes()
        assert len(draft.tokens) == len(draft.parents) == done.drafted
        assert draft.drafted + draft.continued <= done.drafted
        accepted += len(done.tokens) - 1
    got = sampler.tokens[0][len(prompt) :]
    assert got == expected[: len(got)]
    assert accepted > 0


def random_draft(rng: np.random.Generator, nodes: int, text: list[int]) -> Draft:
    """A tree whose nodes are often the text's own next tokens, siblings often equal."""
    tokens, parents, depths = [], [], [0]
    for node in range(1, nodes + 1):
        parent = int(rng.integers(max(node - 4, 0), node))
        depth = depths[parent]
        right = depth < len(text) and rng.random() < 0.6
        tokens.append(text[depth] if right else int(rng.integers(VOCAB)))
        parents.append(parent)
        depths.append(depth + 1)
    return Draft(tokens, parents)


@pytest.mark.parametrize("nodes", [0, 1, 5, 13, 63])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("start_layer", [0, 2])
def test_a_given_draft_is_verified_as_by_its_parts(
    nodes: int, temperature: float, start_layer: int
) -> None:
    """Any tree, chains among them: path, tokens, h_L, the likeliest tokens of every node, and K/V
    of what is accepted.
    """
    decoder, prompt = make_decoder(), [5, 6, 7, 8] * 4
    settings, count = SamplingSettings(temperature, seed=9), decoder.info.num_layers
    if temperature:
        text = drawn(decoder, prompt, 12, Sampler(settings, [prompt]))
    else:
        text = plain(decoder, prompt, 12)
    token, length, rng = text[0], len(prompt), np.random.default_rng(nodes)
    sampler, longest = Sampler(settings, [[*prompt, token]]), 0
    noises = sampler.noises([0] * 64, range(64))
    for number in range(8):
        draft = random_draft(rng, nodes, text[1:])
        if not number:
            draft = Draft.chain((text[1:] + [3] * nodes)[:nodes])
        ids, rows = [token, *draft.tokens], draft.rows(0, length)
        reference, cache = start(decoder, prompt)[0], start(decoder, prompt)[0]
        entering = decoder.embed(torch.tensor(ids), rows.pos)
        for one in (reference, cache)[: 2 if start_layer else 1]:
            below = decoder.layers(entering, rows, 0, start_layer, one)
        hidden = decoder.layers(below, rows, start_layer, count, reference)
        logits = decoder.logits(hidden)
        noise = None if noises is None else [noises[depth] for depth in draft.depths]
        chosen = (
            logits.argmax(-1).tolist() if noise is None else decoder.noisy_argmax(logits, noise)
        )
        path, bonus = accept_greedy(draft, chosen)
        reference.keep(0, [length + node for node in path])
        given = below.clone()
        done = decoder.verify_draft(
            cache,
            0,
            ids,
            draft.parents,
            noises and noises[0],
            5,
            given if start_layer else None,
            start_layer,
        )
        assert done is not None
        assert torch.equal(given, below)
        assert done.path == path
        assert done.tokens == [*(draft.tokens[node - 1] for node in path[1:]), bonus]
        assert torch.equal(done.hidden, hidden)
        assert done.best == decoder.top_tokens(logits, 5)
        cache.commit(0, len(path))
        assert cache.lengths == reference.lengths
        for layer in range(count):
            pairs = zip(cache.standard(layer), reference.standard(layer), strict=True)
            for ours, theirs in pairs:
                assert torch.equal(ours[:, :, : cache.lengths[0]], theirs[:, :, : cache.lengths[0]])
        longest = max(longest, len(path))
    assert longest > min(nodes, 11)


def test_logits_that_are_not_finite_end_the_verification_of_a_given_draft() -> None:
    decoder, prompt = make_decoder(), [5, 6, 7]
    cache, token = start(decoder, prompt)
    [noise] = Sampler(SamplingSettings(1.0, seed=0), [[*prompt, token]]).noises([0], [0])
    embedding_of(decoder)[token] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        decoder.verify_draft(cache, 0, [token, 3], [0], noise)
    assert cache.lengths == [len(prompt)]


def test_a_draft_of_more_nodes_than_a_tree_has_is_not_verified_at_once() -> None:
    decoder, prompt = make_decoder(), [5, 6, 7]
    cache, token = start(decoder, prompt)
    assert decoder.verify_draft(cache, 0, [token] * 65, list(range(64))) is None


def test_logits_that_are_not_finite_end_a_step_at_a_temperature() -> None:
    decoder, prompt = make_decoder(), [5, 6, 7]
    cache, token = start(decoder, prompt)
    branch = decoder.branch()
    steps = FusedSteps(decoder, branch, None, copying(3), Lookups(3))
    steps.begin(cache, None, Sampler(SamplingSettings(1.0, seed=0), [[*prompt, token]]))
    steps.enter(0, [token], text=[*prompt, token])
    embedding_of(decoder)[token] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        run_together([steps], [Growth(3)])
