"""Steps in stages: whatever the narrow copy says, text and K/V are the own weights'."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from multirate.decoding.draft_length import DraftLengthController, Plan
from multirate.decoding.drafter import Drafter
from multirate.decoding.invariants import check_invariants
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.prefix_cache import PrefixCache
from multirate.decoding.speculative import SpeculativeStep
from multirate.decoding.stopping import StopSettings
from multirate.decoding.suffix_automaton import SuffixAutomaton
from multirate.errors import UserError
from multirate.methods import spec
from multirate.methods.common import stages, stream_drafter
from multirate.methods.common.fused_steps import FusedSteps
from multirate.methods.common.shape import BaseShape
from multirate.methods.m2r2.decode import M2R2Drafter
from multirate.methods.m2r2.decode_config import M2R2DecodeConfig
from multirate.methods.two_model.config import TwoModelConfig
from multirate.methods.two_model.decode import TwoModelDrafter
from multirate.model.native import NativeDecoder

from .m2r2_models import LLAMA, PROMPTS, narrow_decoder, stream_of, taps_of
from .test_eagle import layer_of

STOP = StopSettings(max_new_tokens=40)
GREEDY, DRAWN = SamplingSettings(), SamplingSettings(temperature=0.8, seed=7)
EAGER = {"draft_threshold": 0.02, "verify_threshold": 0.01}


@pytest.fixture(scope="module")
def decoder() -> NativeDecoder:
    return narrow_decoder()


def m2r2(decoder: NativeDecoder, gate: int = 1, preset: str = "m2r2-carry", **settings: Any) -> Any:
    stream = stream_of(LLAMA, preset, gates=(gate,), rank=8, taps=taps_of(preset, gate))
    return M2R2Drafter(decoder, stream, M2R2DecodeConfig(**settings))


def trained(decoder: NativeDecoder, method: str = "eagle", **settings: Any) -> Any:
    layer = layer_of(method, BaseShape.of(LLAMA))
    return spec.find(method).make_drafter(decoder, layer, settings)


def untrained(decoder: NativeDecoder, method: str, **settings: Any) -> Any:
    return spec.find(method).make_drafter(decoder, None, settings)


def two_model(decoder: NativeDecoder, **settings: Any) -> Any:
    """The model drafts for itself."""
    config = TwoModelConfig(draft="itself", tokens=3, **settings)
    return config.joined(TwoModelDrafter(decoder, decoder, config), decoder)


JOINED = {"lookup": "sam", "lookup_least": 2}
DIRECT = {"direct_match": 2}
"""Matches of the tests' short texts are short."""
DRAFTERS: dict[str, Callable[..., Any]] = {
    "m2r2-carry": lambda decoder, **more: m2r2(decoder, lookup="sam", **more),
    "m2r2-carry by fixed thresholds": lambda decoder, **more: m2r2(decoder, **EAGER, **more),
    "m2r2-carry at gate 2": lambda decoder, **more: m2r2(decoder, 2, lookup=4, **more),
    "m2r2": lambda decoder, **more: m2r2(decoder, 1, "m2r2", **EAGER, **more),
    "a window of three": lambda decoder, **more: m2r2(
        decoder, window=3, lookup=3, **DIRECT, **more
    ),
    "eagle": lambda decoder, **more: trained(decoder, lookup="sam", **(DIRECT | more)),
    "eagle3": lambda decoder, **more: trained(decoder, "eagle3", **EAGER, **more),
    "sam": lambda decoder, **more: untrained(decoder, "sam", **more),
    "prompt_lookup": lambda decoder, **more: untrained(decoder, "prompt_lookup", **DIRECT, **more),
}
NOT_FUSED: dict[str, Callable[..., Any]] = {
    "token_recycling": lambda decoder, **more: untrained(decoder, "token_recycling", **more),
    "token_recycling, joined": lambda decoder, **more: untrained(
        decoder, "token_recycling", **JOINED, **DIRECT, **more
    ),
    "layerskip": lambda decoder, **more: untrained(decoder, "layerskip", confidence=0.0, **more),
    "lookahead": lambda decoder, **more: untrained(decoder, "lookahead", **more),
    "two_model": lambda decoder, **more: two_model(decoder, **more),
    "two_model, joined": lambda decoder, **more: two_model(decoder, **JOINED, **more),
    "medusa": lambda decoder, **more: trained(decoder, "medusa", **more),
    "hydra": lambda decoder, **more: trained(decoder, "hydra", **EAGER, **more),
    "hydra, joined": lambda decoder, **more: trained(decoder, "hydra", **JOINED, **more),
}
EVERY = DRAFTERS | NOT_FUSED


def in_stages(decoder: NativeDecoder, drafter: Drafter, prompt: list[int], **more: Any) -> Any:
    """A generation of `prompt` in stages."""
    drafter.prepare()
    out = generate(decoder, SpeculativeStep(drafter), [prompt], **more)
    assert drafter.in_stages
    return out


def plain(decoder: NativeDecoder, prompt: list[int], **more: Any) -> Any:
    return generate(decoder, PlainStep(), [prompt], **more)


@functools.cache
def another() -> NativeDecoder:
    torch.manual_seed(99)
    return NativeDecoder(AutoModelForCausalLM.from_config(LLAMA).eval().to(torch.bfloat16))


def copy_of_another() -> Any:
    """A narrow copy that is nearly always wrong: another model's, which it shares a head with."""
    return another().narrow()


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("staged", [1, 2, 5, 11, 20])
@pytest.mark.parametrize("name", EVERY)
def test_text_and_kv_are_the_models_own(
    decoder: NativeDecoder, name: str, staged: int, sampling: SamplingSettings
) -> None:
    drafter = EVERY[name](decoder, staged=staged)

    def check(session: Any, step: Any) -> None:
        check_invariants(session, step, atol=1e-3)

    for prompt in (*PROMPTS, PROMPTS[0] * 4):  # one drafter for all
        out = in_stages(decoder, drafter, prompt, sampling=sampling, stop=STOP, after_step=check)
        assert out.sequences == plain(decoder, prompt, sampling=sampling, stop=STOP).sequences
        assert out.stats.target_passes <= out.stats.tokens


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", EVERY)
def test_a_draft_behind_that_is_not_used_leaves_no_trace(
    decoder: NativeDecoder, name: str, sampling: SamplingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it has too few nodes: the copy goes on from there."""
    run, made = stages.Stages.run, list[int]()

    def without(self: Any, limit: int, ahead: Any, settle: Any, draft: Any, *rest: Any) -> Any:
        def unused(most: int) -> Any:
            made.append(len(draft(most)[0]))
            return stages.NOTHING

        return run(self, limit, ahead, settle, unused, *rest)

    def check(session: Any, step: Any) -> None:
        check_invariants(session, step, atol=1e-3)

    monkeypatch.setattr(stages.Stages, "run", without)
    always = Plan(True)  # even drafts that are not worth it
    monkeypatch.setattr(DraftLengthController, "choose", lambda *_, **__: always)
    drafter = EVERY[name](decoder, staged_ahead=2)
    for prompt in PROMPTS:
        out = in_stages(decoder, drafter, prompt, sampling=sampling, stop=STOP, after_step=check)
        assert out.sequences == plain(decoder, prompt, sampling=sampling, stop=STOP).sequences
    assert any(made)


@pytest.mark.parametrize("name", EVERY)
def test_a_wrong_copy_costs_time_alone(
    decoder: NativeDecoder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of what it says is refused; what the text is looked up in knows no refused token."""
    right = in_stages(decoder, EVERY[name](decoder), PROMPTS[0], stop=STOP)
    monkeypatch.setattr(decoder, "_narrow", copy_of_another())
    drafter = EVERY[name](decoder)

    def check(session: Any, step: Any) -> None:
        check_invariants(session, step, atol=1e-3)
        fused = drafter._fused if name in DRAFTERS else ()
        steps = fused[0] if session.active and 0 in fused else None
        if steps is not None and steps._text._automaton is not None:
            tokens, index = session.sampler.tokens[0], SuffixAutomaton(steps._longest)
            found, matched = index.look_up(tokens, 4)
            assert steps.look_up(4) == (found if matched else [], matched)

    wrong = in_stages(decoder, drafter, PROMPTS[0], stop=STOP, after_step=check)
    assert wrong.sequences == right.sequences
    assert wrong.stats.target_passes > right.stats.target_passes


def test_a_copy_that_is_the_model_is_never_refused(
    decoder: NativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = decoder.narrow()
    assert copy is not None
    same = replace(
        copy, layers=decoder.packed_layers, head=decoder.head, told=decoder.head, exact=None
    )
    monkeypatch.setattr(decoder, "_narrow", same)
    for sampling in (GREEDY, DRAWN):
        drafter = m2r2(decoder, staged_ahead=11)
        out = in_stages(decoder, drafter, PROMPTS[0], sampling=sampling, stop=STOP)
        assert out.stats.accepted == out.stats.drafted
        assert out.stats.target_passes <= -(-out.stats.tokens // 10) + 1


@pytest.mark.parametrize("name", ["sam", "m2r2-carry by fixed thresholds"])
@pytest.mark.parametrize("ahead", [1, 3, 11])
def test_behind_so_many_tokens_ahead_the_rest_is_a_draft(
    decoder: NativeDecoder, name: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eleven nodes together; from eleven tokens ahead on there is none."""
    run, behind = stages.Stages.run, list[int]()

    def noted(self: Any, limit: int, run_ahead: Any, settle: Any, *rest: Any) -> Any:
        def settled(tokens: Any, drafted: Any) -> Any:
            if drafted[0]:
                assert ahead <= len(tokens) and len(tokens) + len(drafted[0]) <= min(11, limit)
                assert all(0 <= parent <= node for node, parent in enumerate(drafted[1]))
            behind.append(len(drafted[0]))
            return settle(tokens, drafted)

        return run(self, limit, run_ahead, settled, *rest)

    monkeypatch.setattr(stages.Stages, "run", noted)
    drafter = EVERY[name](decoder, staged_ahead=ahead)
    for sampling in (GREEDY, DRAWN):
        out = in_stages(decoder, drafter, PROMPTS[0], sampling=sampling, stop=STOP)
        assert out.sequences == plain(decoder, PROMPTS[0], sampling=sampling, stop=STOP).sequences
    assert any(behind) == (ahead < 11)


@pytest.mark.parametrize("name", ["m2r2-carry", "sam", *NOT_FUSED])
def test_text_ends_anywhere_inside_a_pass(decoder: NativeDecoder, name: str) -> None:
    whole = plain(decoder, PROMPTS[0], stop=STOP).sequences[0]
    drafter = EVERY[name](decoder)
    for most in range(1, 16):
        out = in_stages(decoder, drafter, PROMPTS[0], stop=StopSettings(max_new_tokens=most))
        assert out.sequences[0] == whole[:most]
    for place in range(3, 16):
        stop = StopSettings(40, (whole[place],))
        out = in_stages(decoder, drafter, PROMPTS[0], stop=stop)
        assert out.sequences == plain(decoder, PROMPTS[0], stop=stop).sequences
    room = LLAMA.max_position_embeddings
    prompt = (PROMPTS[0] * room)[: room - 7]  # the context ends
    out = in_stages(decoder, drafter, prompt, stop=STOP)
    assert out.sequences == plain(decoder, prompt, stop=STOP).sequences


@pytest.mark.parametrize("name", ["m2r2-carry", "eagle", "sam", *NOT_FUSED])
def test_a_conversation_goes_on_in_the_kept_cache(decoder: NativeDecoder, name: str) -> None:
    drafter, kept = EVERY[name](decoder), PrefixCache()
    drafter.prepare()
    step, prompt = SpeculativeStep(drafter), PROMPTS[0] * 3
    for turn in range(3):
        out = generate(decoder, step, [prompt], stop=STOP, prefix_cache=kept)
        assert drafter.in_stages and (out.stats.resumed > 0) == (turn > 0)
        assert out.sequences == plain(decoder, prompt, stop=STOP).sequences
        prompt = [*prompt, *out.sequences[0], 5, 6]


@pytest.mark.parametrize("direct", [3, 0])
@pytest.mark.parametrize("name", ["m2r2-carry", "eagle", "sam"])
def test_what_follows_a_long_match_goes_to_the_models_own_weights_at_once(
    decoder: NativeDecoder, name: str, direct: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step of the narrow copy begins there, of those of one call neither; and the text is what
    followed the match. 0: every token of a pass is one that the narrow copy has emitted.
    """
    run_ahead, settle = FusedSteps.run_ahead, FusedSteps.settle
    ahead, copied = list[int](), 0

    def text_of(steps: FusedSteps) -> list[int]:
        text = steps._step.text
        return [text.tokens[i] for i in range(text.count)]

    def matched(tokens: list[int], most: int = 1) -> tuple[list[int], int]:
        return SuffixAutomaton(8).look_up(tokens, most)

    def is_long(tokens: list[int]) -> bool:
        return bool(direct) and matched(tokens)[1] >= direct

    def ran(steps: FusedSteps, growth: Any, following: Any) -> Any:
        text = text_of(steps)
        assert not is_long(text)
        done = run_ahead(steps, growth, following)
        for step in done:
            ahead.extend(step.tokens)
        for step in done[:-1]:
            text += step.tokens
            assert not is_long(text)
        return done

    def settled(steps: FusedSteps, tokens: Any, behind: Any) -> Any:
        nonlocal copied
        text, straight = text_of(steps), list(tokens[len(ahead) :])
        if straight:
            assert is_long(text) and matched(text, len(straight))[0] == straight
            assert not behind[0]
            copied += 1
        ahead.clear()
        return settle(steps, tokens, behind)

    monkeypatch.setattr(FusedSteps, "run_ahead", ran)
    monkeypatch.setattr(FusedSteps, "settle", settled)
    drafter = DRAFTERS[name](decoder, direct_match=direct)
    for prompt in (*PROMPTS, PROMPTS[0] * 4):
        out = in_stages(decoder, drafter, prompt, stop=STOP)
        assert out.sequences == plain(decoder, prompt, stop=STOP).sequences
    assert (copied > 0) == (direct > 0)


def test_the_copy_is_made_when_it_pays(
    decoder: NativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "_PAYS", 100)
    monkeypatch.setattr(decoder, "_narrow", None)
    drafter = m2r2(decoder)
    step, seen = SpeculativeStep(drafter), []
    for _ in range(5):
        out = generate(decoder, step, PROMPTS[:1], stop=STOP)
        assert out.sequences == plain(decoder, PROMPTS[0], stop=STOP).sequences
        seen.append((drafter.in_stages, decoder.has_narrow))
    assert seen == [(False, False)] * 3 + [(True, True)] * 2
    # where another method has had it made, there is nothing to wait for
    assert in_stages(decoder, untrained(decoder, "sam"), PROMPTS[0], stop=STOP)


def test_what_is_not_in_stages(decoder: NativeDecoder) -> None:
    """Batches, and tokens that more than an argmax decides; the text is the same in any case."""
    drafter = m2r2(decoder, lookup=4)
    drafter.prepare()
    step = SpeculativeStep(drafter)
    settings = [
        (PROMPTS, GREEDY),
        (PROMPTS[:1], SamplingSettings(temperature=0.8, top_k=9, seed=1)),
        (PROMPTS[:1], SamplingSettings(repetition_penalty=1.2)),
    ]
    for prompts, sampling in settings:
        out = generate(decoder, step, prompts, sampling, STOP)
        assert not drafter.in_stages
        assert out.sequences == generate(decoder, PlainStep(), prompts, sampling, STOP).sequences
    for lossy in ({"margin": 0.1}, {"exit_thresholds": [0.5]}, {"staged": 0}):
        other = m2r2(decoder, **lossy)  # type: ignore[arg-type]
        other.prepare()
        generate(decoder, SpeculativeStep(other), PROMPTS[:1], stop=STOP)
        assert not other.in_stages


@pytest.mark.parametrize("name", EVERY)
def test_it_is_told_where_the_time_goes(decoder: NativeDecoder, name: str) -> None:
    """Of plain steps nowhere else than into the model's own layers and the head."""
    out = in_stages(decoder, EVERY[name](decoder), PROMPTS[0], stop=STOP)
    split = out.stats.split
    assert split is not None and min(split.draft, split.narrow, split.own, split.head) > 0
    if not name.startswith("two_model"):  # here the model's own passes draft, too
        assert sum(astuple(split)) <= out.stats.seconds - out.stats.prefill_seconds
    unstaged = generate(
        decoder, SpeculativeStep(EVERY[name](decoder, staged=0)), PROMPTS, stop=STOP
    )
    without = plain(decoder, PROMPTS[0], stop=STOP).stats.split
    assert unstaged.stats.split is not None and without is not None
    assert unstaged.stats.split.draft > 0 == unstaged.stats.split.narrow
    assert without.own > 0 < without.head and without.draft == without.narrow == 0


@pytest.mark.parametrize("name", EVERY)
def test_after_stages_a_batch_is_verified_by_the_models_own_weights(
    decoder: NativeDecoder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To its last sequence, whose steps are single ones."""
    monkeypatch.setattr(decoder, "_narrow", copy_of_another())
    drafter = EVERY[name](decoder)
    in_stages(decoder, drafter, PROMPTS[0], stop=STOP)
    step = SpeculativeStep(drafter)
    end = plain(decoder, PROMPTS[0], stop=STOP).sequences[0][5]
    for stop in (STOP, StopSettings(40, (end,))):
        out = generate(decoder, step, PROMPTS, stop=stop)
        assert not drafter.in_stages
        assert out.sequences == generate(decoder, PlainStep(), PROMPTS, stop=stop).sequences


def test_what_waits_for_the_stream_is_read_once(
    decoder: NativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every pass of the model's own weights what waits ends right before the last tokens."""
    settle = FusedSteps.settle

    def checked(steps: FusedSteps, tokens: Any, behind: Any) -> Any:
        done = settle(steps, tokens, behind)
        committed = steps._cache.lengths[steps._step.sequence]
        waiting = len(steps.unread)
        assert waiting == sum(len(piece) for piece in steps.unread.carried)
        assert not steps._ahead and steps._entered == len(done.tokens)
        assert waiting <= committed + 1
        return done

    monkeypatch.setattr(FusedSteps, "settle", checked)
    for sampling in (GREEDY, DRAWN):
        in_stages(decoder, m2r2(decoder, lookup="sam"), PROMPTS[2], sampling=sampling, stop=STOP)


@pytest.mark.parametrize("name", ["m2r2-carry", "a window of three", "eagle"])
@pytest.mark.parametrize("settings", [{}, {"margin": 0.0}])
def test_a_conversation_is_told_what_the_stream_has_not_read(
    decoder: NativeDecoder, name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens that wait are those after the ones that it has read, wherever it stops. Of the
    steps of a call the stream drafts some, and others the text.
    """
    monkeypatch.setattr(stream_drafter, "_LEARNED_FROM", 1)
    kinds, waited, rng = [-1, -1, 0, 3], 0, random.Random(1)
    by_match = DraftLengthController.by_match

    def mixed(controller: Any, *given: Any) -> list[int]:
        return [rng.choice(kinds) for _ in by_match(controller, *given)]

    monkeypatch.setattr(DraftLengthController, "by_match", mixed)
    monkeypatch.setattr(stream_drafter, "_CHOSEN_AGAIN", 1)
    drafter = DRAFTERS[name](decoder, **settings)
    drafter.prepare()

    def check(session: Any, step: Any) -> None:
        nonlocal waited
        if not session.active:
            return
        tokens, first = session.sampler.tokens[0], drafter._refreshed
        waiting = drafter._left_behind().ids
        assert first + len(waiting) <= len(tokens)
        assert tokens[first : first + len(waiting)] == waiting
        waited += len(waiting)
        steps = drafter._fused[0]
        entering = steps._ids[: steps._entered].tolist()
        assert tokens[first + len(waiting) :] == entering

    for prompt in (*PROMPTS, PROMPTS[0] * 4):
        generate(decoder, SpeculativeStep(drafter), [prompt], stop=STOP, after_step=check)
    assert waited or settings


@pytest.mark.parametrize(
    "method", ["m2r2-carry", "sam", "prompt_lookup", "lookahead", "token_recycling", "hydra"]
)
def test_settings_out_of_range_are_named(method: str) -> None:
    with pytest.raises(UserError, match="staged"):
        spec.find(method if method != "m2r2-carry" else "m2r2").read_settings({"staged": 99})
