"""M2R2 drafting: lossless whatever the stream's weights, and the same drafts from torch modules and
from the kernel.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from decoding.invariants import check_invariants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_kernel import skip_without_kernel

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.prefix_cache import PrefixCache
from multirate.decoding.speculate.budget import BudgetPolicy, Plan
from multirate.decoding.speculate.costs import CostModel
from multirate.decoding.speculate.given_texts import GivenTexts
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.speculate.step_costs import StepCosts
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.methods._shared import draft_choice
from multirate.methods._shared.draft_estimates import NO_MATCH
from multirate.methods._shared.draft_runner import PackedRunner
from multirate.methods._shared.shape import BaseShape
from multirate.methods.m2r2.config import M2R2Config
from multirate.methods.m2r2.decode import M2R2DecodeConfig, M2R2Drafter, make_runner
from multirate.methods.m2r2.modules import AcceleratedStream
from multirate.methods.m2r2.runner import StreamRunner
from multirate.methods.spec import find
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.native import NativeDecoder
from multirate.runtime.rows import Rows

from .fused_steps import assert_fused_steps_are_steps_in_parts
from .m2r2_models import LLAMA, OTHERS, PROMPTS, model_of, stream_of, taps_of

EAGER_TREE = M2R2DecodeConfig(
    depth=5, width=3, nodes=20, draft_threshold=0.0, verify_threshold=0.0
)  # every tree is as large as can be
SAMPLINGS = [
    None,
    SamplingSettings(temperature=1.0, seed=2),
    SamplingSettings(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=3),
]


@pytest.fixture(scope="module")
def decoders():
    made = {"hf": HFDecoder(model_of(LLAMA))}
    low = model_of(LLAMA, torch.bfloat16)
    if NativeDecoder.supports(low) is None:
        made["native"] = NativeDecoder(low)
    return made


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A file of given texts: random ones, in which pairs and triples of tokens repeat."""
    path = tmp_path_factory.mktemp("texts") / "texts.safetensors"
    tokens = np.random.default_rng(0).integers(0, LLAMA.vocab_size, 20_000)
    GivenTexts.of([tokens.tolist()], LLAMA.vocab_size).save(path)
    return str(path)


@pytest.mark.parametrize("backend", ["hf", "native"])
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 99),
    preset=st.sampled_from(["m2r2", "m2r2-carry"]),
    gate=st.integers(1, 3),
    depth=st.integers(1, 7),
    width=st.integers(1, 4),
    nodes=st.integers(1, 24),
    verify_threshold=st.sampled_from([0, 0.02, 0.3]),
    reduced=st.sampled_from([None, 20]),
    lookup=st.sampled_from([0, "sam"]),
    given_texts=st.booleans(),
    fuse=st.booleans(),
    tapped=st.booleans(),
)
def test_greedy_is_the_base_token_for_token(
    decoders,
    texts,
    backend,
    seed,
    preset,
    gate,
    depth,
    width,
    nodes,
    verify_threshold,
    reduced,
    lookup,
    given_texts,
    fuse,
    tapped,
):
    if backend not in decoders:
        skip_without_kernel()
    decoder = decoders[backend]
    options = {
        "draft_vocab": reduced,
        "fuse": fuse,
        "taps": taps_of(preset, gate) if tapped else (),
    }
    stream = stream_of(LLAMA, preset, seed, gates=(gate,), rank=8, **options)
    drafter = M2R2Drafter(
        decoder,
        stream,
        M2R2DecodeConfig(
            depth,
            width,
            nodes,
            draft_threshold=verify_threshold,
            verify_threshold=verify_threshold,
            lookup=lookup,
            texts=texts if lookup and given_texts else None,
        ),
    )
    stop = StopSettings(max_new_tokens=24)
    plain = generate(decoder, PlainStep(), PROMPTS, stop=stop)
    fast = generate(decoder, SpeculativeStep(drafter), PROMPTS, stop=stop)
    assert fast.sequences == plain.sequences


@pytest.mark.parametrize("name", OTHERS)
def test_greedy_is_the_base_on_other_architectures(name):
    decoder = HFDecoder(model_of(OTHERS[name]))
    stream = stream_of(OTHERS[name], "m2r2-carry", rank=8, mlp_adapter="parallel")
    stop = StopSettings(max_new_tokens=16)
    plain = generate(decoder, PlainStep(), PROMPTS, stop=stop)
    fast = generate(
        decoder, SpeculativeStep(M2R2Drafter(decoder, stream, EAGER_TREE)), PROMPTS, stop=stop
    )
    assert fast.sequences == plain.sequences and fast.stats.drafted > 0


def test_presets_fit_a_model_without_gated_mlp():
    from multirate.methods._shared.teacher import Teacher

    shape = Teacher(model_of(OTHERS["gpt2"])).shape
    assert M2R2Config.for_base(shape, "m2r2-carry").mlp_adapter == "parallel"
    assert M2R2Config.for_base(Teacher(model_of(LLAMA)).shape, "m2r2-carry").mlp_adapter == "lora"


def test_cache_after_every_step_is_a_fresh_prefill(decoders):
    decoder = decoders["hf"]
    steps = []

    def after(session, step):
        steps.append(1)
        check_invariants(session, step)

    stream = stream_of(LLAMA, "m2r2-carry", gates=(2,), rank=8)
    generate(
        decoder,
        SpeculativeStep(M2R2Drafter(decoder, stream, EAGER_TREE)),
        PROMPTS,
        stop=StopSettings(max_new_tokens=20),
        after_step=after,
    )
    assert steps


def test_a_perfect_stream_is_accepted_whole(decoders):
    """Layers beyond the gate that add nothing make the plain early exit exact: every draft must be
    accepted.
    """
    model = model_of(LLAMA)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    decoder = HFDecoder(model)
    base = BaseShape.of(LLAMA)
    stream = AcceleratedStream(M2R2Config.for_base(base, "m2r2-carry"), base)
    drafter = M2R2Drafter(
        decoder,
        stream,
        M2R2DecodeConfig(depth=4, width=1, nodes=4, draft_threshold=0, verify_threshold=0),
    )
    out = generate(
        decoder, SpeculativeStep(drafter), PROMPTS[:1], stop=StopSettings(max_new_tokens=21)
    )
    assert out.stats.target_passes == 4  # one token from the prefill, then 4 steps of 5
    assert out.stats.accepted == out.stats.drafted


@pytest.mark.parametrize("backend", ["hf", "native"])
@pytest.mark.parametrize(
    "sampling", [*SAMPLINGS[1:], SamplingSettings(1.0, repetition_penalty=1.3)]
)
def test_sampled_text_is_plain_decodings(decoders, backend, sampling):
    """Token for token, in trees, in chains (with a penalty), in a batch and alone."""
    if backend not in decoders:
        skip_without_kernel()
    decoder, sampling = decoders[backend], replace(sampling, seed=5)
    stream, stop = stream_of(LLAMA, "m2r2-carry", rank=8), StopSettings(max_new_tokens=12)
    config = replace(EAGER_TREE, lookup="sam")
    for prompts in (PROMPTS[:1], PROMPTS):
        plain = generate(decoder, PlainStep(), prompts, sampling, stop)
        step = SpeculativeStep(M2R2Drafter(decoder, stream, config))
        out = generate(decoder, step, prompts, sampling, stop, after_step=check_invariants)
        assert out.sequences == plain.sequences
        greedy = generate(decoder, PlainStep(), prompts, stop=stop)  # no noise is left behind
        assert generate(decoder, step, prompts, stop=stop).sequences == greedy.sequences


@pytest.mark.parametrize("repetition", [1.0, 1.3])
def test_sampled_tokens_do_not_depend_on_the_batch(decoders, repetition):
    stream = stream_of(LLAMA, "m2r2-carry", rank=8)
    drafter = M2R2Drafter(
        decoders["hf"],
        stream,
        M2R2DecodeConfig(draft_threshold=0.0, verify_threshold=0.0),
    )
    sampling = SamplingSettings(temperature=0.9, top_p=0.9, seed=4, repetition_penalty=repetition)
    out = generate(
        decoders["hf"], SpeculativeStep(drafter), PROMPTS, sampling, StopSettings(max_new_tokens=12)
    )
    one = generate(
        decoders["hf"],
        SpeculativeStep(drafter),
        PROMPTS[:1],
        sampling,
        StopSettings(max_new_tokens=12),
    )
    assert out.sequences[0] == one.sequences[0]


def test_sampling_keeps_the_base_distribution(decoders):
    """χ² of the second and third token over many seeds against the base's own probabilities."""
    from scipy import stats

    decoder = decoders["hf"]
    stream = stream_of(
        LLAMA, "m2r2-carry", rank=8, scale=0.3
    )  # a poor drafter: most drafts are rejected
    drafter = M2R2Drafter(
        decoder,
        stream,
        M2R2DecodeConfig(depth=3, draft_threshold=0.0, verify_threshold=0.0),
    )
    settings_ = dict(temperature=1.5, top_k=6)
    draws = 1500
    out = generate(
        decoder,
        SpeculativeStep(drafter),
        [PROMPTS[0]] * draws,
        SamplingSettings(**settings_, seed=11),
        StopSettings(max_new_tokens=3),
    )
    for position in (1, 2):
        groups: dict[tuple, list[int]] = {}
        for sequence in out.sequences:
            groups.setdefault(tuple(sequence[:position]), []).append(sequence[position])
        history, seen = max(groups.items(), key=lambda item: len(item[1]))
        tokens = PROMPTS[0] + list(history)
        rows = Rows.causal(0, 0, len(tokens))
        x = decoder.embed(torch.tensor(tokens), rows.pos)
        logits = decoder.logits(decoder.layers(x, rows, 0, 4, decoder.new_cache(1, 16))[-1:])
        values, ids = (logits[0] / 1.5).topk(6)
        expected = values.softmax(0).double().numpy() * len(seen)
        observed = np.array([seen.count(int(i)) for i in ids])
        assert observed.sum() == len(seen)
        assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-5


@pytest.mark.parametrize(
    "gate", [1, 2]
)  # after one layer the kernel merges the adapters into its weights
@pytest.mark.parametrize("weights, error", [("bf16", 0.02), ("int8", 0.04)])
def test_kernel_and_torch_modules_draft_alike(decoders, gate, weights, error):
    if "native" not in decoders:
        skip_without_kernel()
    low, exact = decoders["native"], HFDecoder(model_of(LLAMA))
    for preset in ("m2r2", "m2r2-carry"):
        streams = [stream_of(LLAMA, preset, gates=(gate,), rank=8) for _ in range(2)]
        runners = [
            make_runner(low, streams[0], gate, weights),
            StreamRunner(exact, streams[1], gate),
        ]
        assert isinstance(runners[0], PackedRunner)
        assert runners[0].keys_only == (preset == "m2r2-carry" and gate == 1)  # merged
        found = []
        for runner in runners:
            cache = runner.decoder.new_cache(1, 32)
            runner.begin(cache)
            torch.manual_seed(1)
            rows = Rows.causal(0, 0, 9)
            carried = torch.randn(9, 128)
            runner.slow(list(range(7)), Rows.causal(0, 0, 7))
            h, p = runner.step(list(range(9)), rows, carried, fresh=2)
            p = p[7:]  # which read the keys and values of the others
            found.append((p, runner.logits(p), h))
        if runners[0].keys_only:
            found = [parts[:2] for parts in found]
        for ours, theirs in zip(*found, strict=True):
            assert (ours - theirs).norm() < error * theirs.norm()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 99),
    preset=st.sampled_from(["m2r2", "m2r2-carry"]),
    gate=st.integers(1, 2),
    depth=st.integers(1, 7),
    width=st.integers(1, 4),
    nodes=st.integers(1, 20),
    verify_threshold=st.sampled_from([0.0, 0.02, 0.1]),
    reduced=st.sampled_from([None, 20]),
    lookup=st.sampled_from([0, "sam"]),
    given_texts=st.booleans(),
    weights=st.sampled_from(["bf16", "int8"]),
    sampling=st.sampled_from(SAMPLINGS),
    fuse=st.booleans(),
    tapped=st.booleans(),
)
def test_a_round_in_one_kernel_call_is_the_round_in_parts(
    decoders,
    texts,
    seed,
    preset,
    gate,
    depth,
    width,
    nodes,
    verify_threshold,
    reduced,
    lookup,
    given_texts,
    weights,
    sampling,
    fuse,
    tapped,
):
    """Same drafts, same tokens step by step (plain decoding's), and the same committed keys and
    values, bit for bit.
    """
    if "native" not in decoders:
        skip_without_kernel()
    decoder = decoders["native"]
    options = {
        "draft_vocab": reduced,
        "fuse": fuse,
        "taps": taps_of(preset, gate) if tapped else (),
    }
    stream = stream_of(LLAMA, preset, seed, gates=(gate,), rank=8, **options)
    config = M2R2DecodeConfig(
        depth,
        width,
        nodes,
        draft_threshold=verify_threshold,
        verify_threshold=verify_threshold,
        lookup=lookup,
        texts=texts if lookup and given_texts else None,
        weights=weights,
    )
    assert_fused_steps_are_steps_in_parts(
        decoder, lambda: M2R2Drafter(decoder, stream, config), PROMPTS[0], sampling=sampling
    )


COSTS = CostModel(StepCosts(1.0, {1: 1.0, 16: 2.0}, 0.1, 0.05))


@pytest.fixture
def untimed(monkeypatch):
    """Every step takes as long as COSTS say, on any machine."""
    policy = functools.partial(BudgetPolicy, timed=False)
    monkeypatch.setattr(draft_choice, "BudgetPolicy", policy)


def adaptive(decoder, stream, **settings):
    """A drafter that decides by itself when to draft, with costs given instead of measured."""
    drafter = M2R2Drafter(decoder, stream, M2R2DecodeConfig(**settings))
    drafter.costs = lambda decoder: COSTS
    return drafter


@pytest.mark.parametrize("preset", ["m2r2", "m2r2-carry"])
@pytest.mark.parametrize("lookup", [0, "sam"])
@pytest.mark.parametrize("seed", [0, 1])
def test_steps_that_choose_their_draft_are_the_same_in_one_call_and_in_parts(
    decoders, untimed, texts, preset, lookup, seed
):
    if "native" not in decoders:
        skip_without_kernel()
    decoder = decoders["native"]
    stream = stream_of(LLAMA, preset, seed, gates=(1 + seed,), rank=8)
    assert_fused_steps_are_steps_in_parts(
        decoder,
        lambda: adaptive(decoder, stream, lookup=lookup, texts=texts if lookup and seed else None),
        [7, 8, 9] * 5,
        60,
    )


@pytest.mark.parametrize("preset", ["m2r2", "m2r2-carry"])
@pytest.mark.parametrize("sampling", [None, SamplingSettings(temperature=0.5, seed=1)])
def test_fused_batches_larger_than_a_pass(decoders, preset, sampling):
    """More rows than the kernel takes at once: of last tokens, of levels and of verification."""
    if "native" not in decoders:
        skip_without_kernel()
    decoder, stop = decoders["native"], StopSettings(max_new_tokens=8)
    prompts = [[3 + i % 9, 4, 5 + i % 5] * (1 + i % 3) for i in range(37)]
    config = M2R2DecodeConfig(
        depth=3, nodes=5, width=2, draft_threshold=0.0, verify_threshold=0.0, lookup=0
    )
    drafter = M2R2Drafter(decoder, stream_of(LLAMA, preset, rank=8), config)
    fused, rows = drafter.fused_steps, []

    def note(*given):
        done = fused(*given)
        rows.append(sum(step.drafted + 1 for step in done))
        return done

    drafter.fused_steps = note
    plain = generate(decoder, PlainStep(), prompts, sampling, stop)
    out = generate(decoder, SpeculativeStep(drafter), prompts, sampling, stop)
    assert out.sequences == plain.sequences
    assert max(rows) > 128


@pytest.mark.parametrize("backend", ["hf", "native"])
@pytest.mark.parametrize("sampling", [None, SamplingSettings(temperature=0.02, seed=1)])
def test_a_useless_stream_is_left_alone(decoders, untimed, backend, sampling):
    if backend not in decoders:
        skip_without_kernel()
    decoder = decoders[backend]
    stop = StopSettings(max_new_tokens=100)
    drafter = adaptive(decoder, stream_of(LLAMA, "m2r2-carry", rank=8))
    for prompts in (PROMPTS[:1], PROMPTS):
        plain = generate(decoder, PlainStep(), prompts, sampling, stop)
        out = generate(decoder, SpeculativeStep(drafter), prompts, sampling, stop)
        assert out.sequences == plain.sequences
        assert out.stats.drafted < 0.3 * out.stats.sequence_steps


@pytest.mark.parametrize("backend", ["hf", "native"])
def test_a_conversation_goes_on_in_its_cache_though_the_stream_rested(decoders, untimed, backend):
    if backend not in decoders:
        skip_without_kernel()
    decoder, stop = decoders[backend], StopSettings(max_new_tokens=20)
    drafter = adaptive(decoder, stream_of(LLAMA, "m2r2-carry", rank=8))
    kept, prompt = PrefixCache(), [5, 9, 2, 44, 17, 8, 30, 31, 7, 6]
    for turn in range(4):
        out = generate(decoder, SpeculativeStep(drafter), [prompt], stop=stop, prefix_cache=kept)
        plain = generate(decoder, PlainStep(), [prompt], stop=stop)
        assert out.sequences == plain.sequences
        if turn > 1:
            assert out.stats.drafted < 5 and out.stats.resumed > len(prompt) - 10
        prompt = [*prompt, *out.sequences[0], 3, 4]


def test_a_stream_that_rested_drafts_as_one_that_did_not(decoders):
    """Its block has then read every token with its true carried residual."""
    decoder = decoders["hf"]
    stream = stream_of(LLAMA, "m2r2-carry", rank=8)
    fixed = dict(depth=4, nodes=4, draft_threshold=0.0, verify_threshold=0.0)
    drafts = []
    for resting in (range(0), range(2, 9)):
        drafter = M2R2Drafter(decoder, stream, M2R2DecodeConfig(**fixed))
        original, choose = drafter.draft, drafter._choice.plan
        seen, steps = {}, itertools.count()

        def chosen(request, *rest, choose=choose, drafter=drafter, steps=steps, resting=resting):
            plan, seqs = choose(request, *rest), request.seqs
            if next(steps) in resting:
                drafter._choice.drafted = set()
                drafter._choice.matches = dict.fromkeys(seqs, NO_MATCH)
                plan = Plan(False, (0,) * len(seqs))
            return plan

        def draft(request, original=original, seen=seen, drafter=drafter):
            made = original(request)
            for seq, one in zip(request.seqs, made, strict=True):
                if one.tokens:
                    seen[seq, len(drafter._sampler.tokens[seq])] = one.tokens
            return made

        drafter._choice.plan, drafter.draft = chosen, draft
        generate(decoder, SpeculativeStep(drafter), PROMPTS, stop=StopSettings(max_new_tokens=24))
        drafts.append(seen)
    both = drafts[0].keys() & drafts[1].keys()
    assert len(drafts[1]) < len(drafts[0]) and len(both) > 20
    assert all(drafts[0][at] == drafts[1][at] for at in both)


@pytest.mark.parametrize("backend", ["hf", "native"])
def test_a_text_that_repeats_itself_is_followed(decoders, backend):
    """One level a step is drafted, the rest is what the text said before; fused steps and parts
    follow alike.
    """
    if backend not in decoders:
        skip_without_kernel()
    model = model_of(LLAMA, torch.bfloat16 if backend == "native" else torch.float32)
    with (
        torch.no_grad()
    ):  # layers that add nothing: the next token depends on the last one alone, the text goes round
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    decoder = NativeDecoder(model) if backend == "native" else HFDecoder(model)
    base = BaseShape.of(LLAMA)
    stream = AcceleratedStream(M2R2Config.for_base(base, "m2r2-carry"), base)
    stop = StopSettings(max_new_tokens=100)
    plain = generate(decoder, PlainStep(), PROMPTS, stop=stop)
    steps = {}
    for lookup in (0, "sam"):
        config = M2R2DecodeConfig(
            depth=2,
            nodes=9,
            draft_threshold=0.3,
            verify_threshold=0.2,
            lookup=lookup,
        )
        out = generate(
            decoder, SpeculativeStep(M2R2Drafter(decoder, stream, config)), PROMPTS, stop=stop
        )
        one = generate(
            decoder, SpeculativeStep(M2R2Drafter(decoder, stream, config)), PROMPTS[:1], stop=stop
        )
        assert out.sequences == plain.sequences and one.sequences == plain.sequences[:1]
        steps[lookup] = out.stats.sequence_steps, one.stats.sequence_steps
    assert steps["sam"][0] < 0.6 * steps[0][0] and steps["sam"][1] < 0.6 * steps[0][1]
    if backend == "native":
        assert_fused_steps_are_steps_in_parts(
            decoder, lambda: M2R2Drafter(decoder, stream, config), PROMPTS[0], 100
        )
        for sampling in (None, SamplingSettings(temperature=0.3, seed=1)):
            for name in ("prompt_lookup", "sam"):
                assert_fused_steps_are_steps_in_parts(
                    decoder, partial(find(name).make_drafter, decoder), PROMPTS[0], 100, sampling
                )


def test_drafts_too_long_for_a_whole_round_run_in_parts(decoders):
    """The kernel's arrays end at 63 nodes; a chain from outside the model may be longer."""
    if "native" not in decoders:
        skip_without_kernel()
    decoder, prompt, stop = decoders["native"], [[8, 9] * 20], StopSettings(max_new_tokens=90)
    plain = generate(decoder, PlainStep(), prompt, stop=stop)
    for tokens in (63, 64, 100):
        drafter = find("prompt_lookup").make_drafter(decoder, settings={"tokens": tokens})
        assert (
            generate(decoder, SpeculativeStep(drafter), prompt, stop=stop).sequences
            == plain.sequences
        )


def test_settings_out_of_range_are_named():
    with pytest.raises(UserError, match="'depth' is 0"):
        M2R2DecodeConfig(depth=0)
    for wrong in (
        {"lookup": "x"},
        {"nodes": 2.5},
        {"verify_threshold": [1]},
        {"depth": True},
    ):
        with pytest.raises(UserError, match=f"'{next(iter(wrong))}' is"):
            M2R2DecodeConfig(**wrong)
    with pytest.raises(UserError, match="needs an accelerator"):
        find("m2r2").make_drafter(None, None)  # type: ignore[arg-type]
