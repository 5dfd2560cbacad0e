"""Who decided each token, against what the decoding itself counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from methods.m2r2_models import LLAMA, PROMPTS, model_of, stream_of

from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.stopping import StopSettings
from multirate.lab.inspection.decisions import Kind, decode
from multirate.methods.m2r2.decode_config import CarryDecodeConfig, M2R2DecodeConfig
from multirate.methods.m2r2.exits import step_of
from multirate.runtime.decoder import Decoder
from multirate.runtime.hf.decoder import HFDecoder

LAYERS = LLAMA.num_hidden_layers
STOP = StopSettings(max_new_tokens=30)
SURE = {"draft_threshold": 0.0, "verify_threshold": 0.0}  # nothing that is timed decides


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return HFDecoder(model_of(LLAMA))


def plain(decoder: Decoder, prompt: list[int]) -> list[int]:
    return generate(decoder, PlainStep(), [prompt], stop=STOP).sequences[0]


def test_plain_decoding_is_the_models_alone(decoder: Decoder) -> None:
    tokens, decisions = decode(decoder, PlainStep(), PROMPTS[0], STOP)
    assert tokens == plain(decoder, PROMPTS[0])
    assert {(one.kind, one.layers) for one in decisions} == {(Kind.MODEL, LAYERS)}
    assert len(decisions) == len(tokens) == 30


@pytest.mark.parametrize("prompt", PROMPTS)
def test_drafted_and_copied_tokens(decoder: Decoder, prompt: list[int]) -> None:
    stream = stream_of(LLAMA, "m2r2-carry", rank=4)
    step = step_of(decoder, stream, CarryDecodeConfig(**SURE))
    tokens, decisions = decode(decoder, step, prompt, STOP)
    assert tokens == plain(decoder, prompt)
    output = generate(decoder, step, [prompt], stop=STOP)
    kinds = Counter(one.kind for one in decisions)
    assert kinds[Kind.DRAFT] + kinds[Kind.COPIED] == output.stats.accepted
    assert kinds[Kind.COPIED] and not kinds[Kind.LEFT], "this text repeats itself"
    for one in decisions:
        assert one.layers == {Kind.DRAFT: 1, Kind.COPIED: 0, Kind.MODEL: LAYERS}[one.kind]
    without = step_of(decoder, stream, M2R2DecodeConfig(**SURE))
    _, decisions = decode(decoder, without, prompt, STOP)
    assert Kind.COPIED not in {one.kind for one in decisions}


def test_watching_ends_with_the_text(decoder: Decoder) -> None:
    step = step_of(decoder, stream_of(LLAMA, "m2r2-carry", rank=4), CarryDecodeConfig())
    assert isinstance(step, SpeculativeStep)
    decode(decoder, step, PROMPTS[0], STOP)
    assert step.watch is None


@pytest.mark.parametrize(
    ("gates", "thresholds", "expected"),
    [((1, 3), (0.0, None), 1), ((1, 3), (2.0, 0.0), 3), ((1, 3), (2.0, 2.0), LAYERS)],
)
def test_tokens_that_leave_at_several_gates(
    decoder: Decoder, gates: tuple[int, ...], thresholds: tuple[Any, ...], expected: int
) -> None:
    stream = stream_of(LLAMA, "m2r2", rank=4, gates=gates)
    step = step_of(decoder, stream, M2R2DecodeConfig(exit_thresholds=thresholds))
    tokens, decisions = decode(decoder, step, PROMPTS[0], STOP)
    assert len(tokens) == 30
    assert (decisions[0].kind, decisions[0].layers) == (Kind.MODEL, LAYERS)  # the prompt's pass
    kind = Kind.MODEL if expected == LAYERS else Kind.LEFT
    assert {(one.kind, one.layers) for one in decisions[1:]} == {(kind, expected)}


def test_tokens_that_are_trusted_at_one_gate(decoder: Decoder) -> None:
    stream = stream_of(LLAMA, "m2r2-carry", rank=4)
    step = step_of(decoder, stream, CarryDecodeConfig(exit_thresholds=(0.5,), exit_score="arla"))
    tokens, decisions = decode(decoder, step, PROMPTS[0], STOP)
    output = generate(decoder, step, [PROMPTS[0]], stop=STOP)
    assert output.sequences[0] == tokens
    left = [one for one in decisions if one.kind is Kind.LEFT]
    assert {one.layers for one in left} <= {1}
    assert len(left) == output.stats.exits.get(1, 0) > 0
