"""CALM's confidences, its threshold that decays, and its classifiers' training."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from multirate.decoding.dynamic_depth import DynamicDepthStep
from multirate.decoding.loop import generate
from multirate.decoding.session import Session
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.lab.depth_baselines.calm.config import (
    CalmClassifierConfig,
    CalmClassifierDecodeConfig,
    CalmConfig,
    default_exits,
)
from multirate.lab.depth_baselines.calm.exits import decayed, trained_exits, untrained_exits
from multirate.lab.depth_baselines.calm.modules import ExitClassifiers
from multirate.lab.depth_baselines.calm.spec import CalmObjective
from multirate.methods._shared.objective import balanced_bce
from multirate.methods._shared.teacher import Teacher
from multirate.runtime.decoder import Decoder
from multirate.runtime.hf.decoder import HFDecoder
from multirate.runtime.rows import Rows

from .m2r2_models import LLAMA, PROMPTS, model_of
from .tiny import base, disturb, ids

LAYERS = LLAMA.num_hidden_layers
STOP = StopSettings(max_new_tokens=20)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return HFDecoder(model_of(LLAMA))


def started(decoder: Decoder, policy: Any, prompts: list[list[int]] = PROMPTS) -> Session:
    session = Session(decoder, prompts, None, STOP)
    policy.begin(session)
    return session


def residuals(decoder: Decoder, prompts: list[list[int]]) -> dict[int, torch.Tensor]:
    """What the last tokens of the prompts enter layers 1, 2 and 3 with, [n, d] each."""
    found: dict[int, list[torch.Tensor]] = {1: [], 2: [], 3: []}
    for prompt in prompts:
        rows = Rows.causal(0, 0, len(prompt))
        x = decoder.embed(torch.tensor(prompt), rows.pos)
        cache = decoder.new_cache(1, len(prompt))
        _, taps = decoder.layers_with_taps(x, rows, 0, LAYERS, cache, (1, 2, 3))
        for layer, states in taps.items():
            found[layer].append(states[-1])
    return {layer: torch.stack(states) for layer, states in found.items()}


def test_the_threshold_decays_from_itself_to_nine_tenths() -> None:
    assert decayed(0.8, 4.0, 0.0) == pytest.approx(0.8)
    assert decayed(0.8, 4.0, 0.5) == pytest.approx(0.72 + 0.08 * math.exp(-2))
    assert decayed(0.8, 0.0, 0.5) == pytest.approx(0.8)
    values = [decayed(0.8, 4.0, t / 20) for t in range(21)]
    assert values == sorted(values, reverse=True) and values[-1] > 0.72


def test_every_sequence_is_at_its_own_place_of_the_decay(decoder: Decoder) -> None:
    policy = untrained_exits(decoder, CalmConfig(threshold=0.5, exits=(1, 2)))
    session = started(decoder, policy)
    for b, count in enumerate((1, 4, 2)):
        session.emit(b, [9] * count)
    for b, count in enumerate((1, 4, 2)):
        assert policy.threshold(1, b) == pytest.approx(decayed(0.5, 4.0, count / 20))


def test_the_softmax_confidence_is_top_1_minus_top_2(decoder: Decoder) -> None:
    policy = untrained_exits(decoder, CalmConfig(exits=(1, 2, 3), threshold=0.0))
    started(decoder, policy)
    hidden = residuals(decoder, PROMPTS)[2]
    best = decoder.logits(hidden).softmax(-1).topk(2).values
    scores, logits = policy.scores(2, hidden, [0, 1, 2])
    torch.testing.assert_close(torch.tensor(scores), best[:, 0] - best[:, 1])
    assert logits is not None
    assert torch.equal(policy.logits(decoder, 2, hidden), decoder.logits(hidden))


def test_the_state_confidence_compares_a_row_with_itself_an_exit_before(decoder: Decoder) -> None:
    config = CalmConfig(confidence="state", exits=(1, 2, 3), threshold=-1.0)
    policy = untrained_exits(decoder, config)
    started(decoder, policy)
    states = residuals(decoder, PROMPTS)
    assert policy.leave(1, states[1], [0, 1, 2]).rows == [False] * 3, "nothing to compare with"
    first, _ = policy.scores(2, states[2], [0, 1, 2])
    second, _ = policy.scores(3, states[3][[2, 0]], [2, 0])  # sequence 1 has left
    cosine = torch.nn.functional.cosine_similarity
    torch.testing.assert_close(torch.tensor(first), cosine(states[1], states[2], dim=-1))
    expected = cosine(states[2], states[3], dim=-1)[[2, 0]]
    torch.testing.assert_close(torch.tensor(second), expected)
    out = generate(decoder, DynamicDepthStep(policy, "propagate"), PROMPTS, stop=STOP)
    assert set(out.stats.exits) == {2}


def test_the_classifiers_score_their_own_exits(decoder: Decoder) -> None:
    from multirate.methods._shared.shape import BaseShape

    shape = BaseShape.of(LLAMA)
    module = ExitClassifiers(CalmClassifierConfig.for_base(shape, exits=[1, 3]), shape)
    assert module.score(0, torch.randn(2, shape.hidden_size)).tolist() == [0.5, 0.5]
    disturb(module, 0.2)
    policy = trained_exits(decoder, module.requires_grad_(False), CalmClassifierDecodeConfig())
    started(decoder, policy)
    hidden = residuals(decoder, PROMPTS)[3]
    normed = decoder.norm(hidden)
    expected = torch.sigmoid(normed @ module.weight[1] + module.bias[1])
    scores, logits = policy.scores(3, hidden, [0, 1, 2])
    torch.testing.assert_close(torch.tensor(scores), expected)
    assert logits is None, "the head is applied where a token leaves"
    both = module(torch.stack([normed, normed]))
    torch.testing.assert_close(both[1].sigmoid(), expected)


@torch.no_grad()
def test_the_objective_teaches_where_exits_say_what_the_last_layer_says() -> None:
    teacher = Teacher(base())
    module = ExitClassifiers(CalmClassifierConfig((1, 3)), teacher.shape)
    disturb(module)
    tokens = ids(2, 9)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, :4] = False
    loss, report = CalmObjective(teacher, module)(tokens, mask)
    slow = teacher.slow(tokens, shared=0, gates=(1, 3))
    said = teacher.head.logits(slow.normed[mask]).argmax(-1)
    losses = []
    for which, exit in enumerate((1, 3)):
        normed = teacher.norm(slow.residual[exit][mask])
        agree = teacher.head.logits(normed).argmax(-1) == said
        assert torch.equal(report.result.agree[which], agree)
        losses.append(balanced_bce(normed @ module.weight[which] + module.bias[which], agree))
    torch.testing.assert_close(loss, torch.stack(losses).mean())
    assert report.arla is not None and [term.gate for term in report.terms] == [1, 3]


def test_a_reduced_head_without_training_is_the_vocabularys_first_ids(decoder: Decoder) -> None:
    config = CalmConfig(exits=(1,), threshold=0.0, draft_vocab=10)
    step = DynamicDepthStep(untrained_exits(decoder, config), "propagate")
    out = generate(decoder, step, PROMPTS, stop=STOP)
    assert {token for tokens in out.sequences for token in tokens[1:]} <= set(range(10))
    whole = CalmConfig(exits=(1,), threshold=0.0, draft_vocab=LLAMA.vocab_size + 1)
    step = DynamicDepthStep(untrained_exits(decoder, whole), "propagate")
    free = CalmConfig(exits=(1,), threshold=0.0)
    again = DynamicDepthStep(untrained_exits(decoder, free), "propagate")
    texts = [generate(decoder, one, PROMPTS, stop=STOP).sequences for one in (step, again)]
    assert texts[0] == texts[1]


def test_default_exits_are_in_the_upper_third() -> None:
    assert default_exits(30) == (20, 22, 25, 28)
    assert all(0 < exit < layers for layers in range(2, 40) for exit in default_exits(layers))


@pytest.mark.parametrize("exits", [(2, 1), (0, 1), (LAYERS,)])
def test_exits_that_the_model_does_not_have_are_refused(
    decoder: Decoder, exits: tuple[int, ...]
) -> None:
    with pytest.raises(UserError, match="calm's exits are"):
        untrained_exits(decoder, CalmConfig(exits=exits))


@pytest.mark.parametrize(
    "wrong",
    [{"confidence": "classifier"}, {"decay": -1.0}, {"draft_vocab": 1}, {"threshold": "high"}],
)
def test_settings_that_cannot_be_used_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        CalmConfig(**wrong)
