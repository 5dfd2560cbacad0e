"""Drafts that are made in Python and verified in one call of the kernel: the drafts, tokens, K/V
and statistics of verification in parts, whoever drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from decoding.helpers import KINDS, ScriptedDrafter, scripts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_kernel import skip_without_kernel

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.speculate.drafter import Draft, Drafter, DraftRequest, Verified
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.methods._shared.shape import BaseShape
from multirate.methods.medusa.config import MedusaConfig, MedusaDecodeConfig
from multirate.methods.medusa.decode import MedusaDrafter
from multirate.methods.medusa.modules import MedusaHeads
from multirate.methods.spec import find
from multirate.methods.two_model.decode import TwoModelConfig, TwoModelDrafter
from multirate.runtime.decoder import Decoder
from multirate.runtime.native import NativeDecoder

from .fused_steps import assert_drafts_are_verified_whole_as_in_parts, verified_in_parts
from .m2r2_models import LLAMA, PROMPTS, model_of
from .tiny import disturb

VOCAB = LLAMA.vocab_size
SAMPLINGS = [None, SamplingSettings(0.5, seed=2), SamplingSettings(1.0, seed=3)]


@cache
def decoder_of(repeated_rows: int = 0) -> NativeDecoder:
    """repeated_rows: so many tokens at the vocabulary's end have the logits of those before them,
    bit for bit.
    """
    model = model_of(LLAMA, torch.bfloat16)
    skip_without_kernel()
    if repeated_rows:
        with torch.no_grad():
            head = model.lm_head.weight
            head[-repeated_rows:] = head[-2 * repeated_rows : -repeated_rows]
    return NativeDecoder(model)


def without_training(name: str, **chosen: Any) -> Callable[[Decoder], Drafter]:
    def make(decoder: Decoder) -> Drafter:
        made = find(name).make_drafter(decoder, settings=chosen)
        assert made is not None
        return made

    return make


def medusa(decoder: Decoder) -> Drafter:
    shape = BaseShape.of(LLAMA)
    torch.manual_seed(0)
    heads = MedusaHeads(MedusaConfig.for_base(shape), shape)
    disturb(heads, 0.1)
    return MedusaDrafter(decoder, heads.requires_grad_(False), MedusaDecodeConfig())


def two_model(decoder: Decoder) -> Drafter:
    """The base itself drafts."""
    return TwoModelDrafter(decoder, decoder, TwoModelConfig(draft="itself", tokens=3))


DRAFTERS = {
    "token_recycling": without_training("token_recycling"),
    "one successor": without_training("token_recycling", k=1),
    "many successors": without_training("token_recycling", k=61),
    "lookahead": without_training("lookahead"),
    "a long lookahead": without_training("lookahead", ngram=5, window=7, guesses=7),
    "layerskip": without_training("layerskip", exit_layer=3, confidence=0.0),
    "medusa": medusa,
    "two_model": two_model,
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_whoever_drafts(name: str, sampling: SamplingSettings | None) -> None:
    """Two texts after each other by one drafter; the longer prompt repeats itself."""
    decoder = decoder_of()
    accepted = assert_drafts_are_verified_whole_as_in_parts(
        decoder,
        lambda: DRAFTERS[name](decoder),
        [PROMPTS[0], [7, 8, 9] * 5],
        new_tokens=30,
        sampling=sampling,
    )
    assert accepted > 0 or sampling is not None or name == "medusa"


def test_the_likeliest_tokens_of_equal_logits_are_those_of_parts() -> None:
    decoder = decoder_of(repeated_rows=30)
    assert_drafts_are_verified_whole_as_in_parts(
        decoder, lambda: DRAFTERS["token_recycling"](decoder), [PROMPTS[0]], new_tokens=30
    )
    drafter, ties = DRAFTERS["token_recycling"](decoder), 0
    accept = drafter.accept

    def accepting(seq: int, verified: Verified) -> None:
        nonlocal ties
        assert verified.top is not None
        for best in verified.top:
            pairs = list(pairwise(best))
            ties += sum(second == first + 30 for first, second in pairs)
            assert not any(first == second + 30 for first, second in pairs)
        accept(seq, verified)

    drafter.accept = accepting  # type: ignore[method-assign]
    stop = StopSettings(max_new_tokens=30)
    generate(decoder, SpeculativeStep(drafter), PROMPTS[:1], stop=stop)
    assert ties > 10


@cache
def future(number: int, sampling: SamplingSettings | None) -> list[int]:
    stop = StopSettings(max_new_tokens=40)
    out = generate(decoder_of(), PlainStep(), PROMPTS[number : number + 1], sampling, stop)
    return [*PROMPTS[number], *out.sequences[0]]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(KINDS),
    prompt=st.integers(0, 2),
    sampling=st.sampled_from(SAMPLINGS),
    start=st.integers(0, 2),
    lazy=st.booleans(),
    top=st.integers(0, 9),
    count=st.integers(1, 24),
    seed=st.integers(0, 99),
)
def test_whatever_is_drafted(
    kind: str,
    prompt: int,
    sampling: SamplingSettings | None,
    start: int,
    lazy: bool,
    top: int,
    count: int,
    seed: int,
) -> None:
    """Trees of up to 63 nodes, right ones, wrong ones and those that go on behind the text's end;
    embedded by the kernel, or run by the drafter up to layer `start`.
    """
    decoder, true = decoder_of(), future(prompt, sampling)

    def make() -> Drafter:
        drafter = ScriptedDrafter(
            scripts(kind, [true], VOCAB, seed), decoder if start else None, start, lazy
        )
        drafter.traits = replace(drafter.traits, top=top)
        return drafter

    accepted = assert_drafts_are_verified_whole_as_in_parts(
        decoder, make, [PROMPTS[prompt]], count, sampling
    )
    if kind == "right" and count > 10:
        assert accepted > count


@pytest.mark.parametrize(
    ("sampling", "prompts"),
    [
        (SamplingSettings(repetition_penalty=1.3), PROMPTS[:1]),
        (SamplingSettings(1.0, top_p=0.9, seed=3), PROMPTS[:1]),
        (None, PROMPTS),
    ],
)
def test_other_settings_and_batches_are_verified_in_parts_until_one_is_left(
    sampling: SamplingSettings | None, prompts: list[list[int]]
) -> None:
    decoder, stop = decoder_of(), StopSettings(max_new_tokens=12)
    plain = generate(decoder, PlainStep(), prompts, sampling, stop)
    with verified_in_parts(decoder, parts=False) as whole:
        step = SpeculativeStep(DRAFTERS["token_recycling"](decoder))
        out = generate(decoder, step, prompts, sampling, stop)
    assert out.sequences == plain.sequences
    assert len(whole) < out.stats.sequence_steps if len(prompts) > 1 else not whole


@pytest.mark.parametrize("name", ["token_recycling", "lookahead"])
def test_logits_that_are_not_finite_end_the_text_with_a_reason(name: str) -> None:
    model = model_of(LLAMA, torch.bfloat16)
    decoder = NativeDecoder(model)
    step, stop = SpeculativeStep(DRAFTERS[name](decoder)), StopSettings(max_new_tokens=30)

    def spoil(session: Any, step: Any) -> None:
        model.get_input_embeddings().weight.data[:] = torch.nan

    with pytest.raises(UserError, match="not finite"):
        generate(decoder, step, PROMPTS[:1], SamplingSettings(1.0, seed=3), stop, after_step=spoil)


@pytest.mark.parametrize("name", ["token_recycling", "lookahead"])
def test_steps_that_rest_leave_the_text_as_it_is(name: str) -> None:
    """A step without a draft is a plain one, and drafts go on after it."""
    decoder, stop = decoder_of(), StopSettings(max_new_tokens=30)

    def resting() -> Drafter:
        drafter, steps = DRAFTERS[name](decoder), 0
        draft = drafter.draft

        def drafting(request: DraftRequest) -> list[Draft]:
            nonlocal steps
            steps += 1
            if steps % 3 == 0:
                request = replace(request, limits=[0] * len(request.limits))
            made = draft(request)
            return [one.cut(limit, 63) for one, limit in zip(made, request.limits, strict=True)]

        drafter.draft = drafting  # type: ignore[method-assign]
        return drafter

    for sampling in SAMPLINGS:
        assert_drafts_are_verified_whole_as_in_parts(
            decoder, resting, [[7, 8, 9] * 5], 30, sampling
        )
    plain = generate(decoder, PlainStep(), PROMPTS[:1], stop=stop)
    assert (
        generate(decoder, SpeculativeStep(resting()), PROMPTS[:1], stop=stop).sequences
        == plain.sequences
    )
