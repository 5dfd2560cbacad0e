"""FREE's adaptive threshold: what it is fitted to, and that decoding shows it the truth."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from multirate.decoding.dynamic_depth import DynamicDepthStep
from multirate.decoding.loop import generate
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.methods import spec
from multirate.methods.common.shape import BaseShape
from multirate.methods.free.adaptive_threshold import LEAST_PAIRS, LOWEST, AdaptiveThreshold
from multirate.methods.free.config import FreeDecodeConfig
from multirate.methods.free.exits import AdaptiveExit
from multirate.model.decoder import Decoder
from multirate.model.hf.decoder import HFDecoder
from multirate.model.rows import Rows

from .m2r2_models import LLAMA, PROMPTS, model_of

EXIT, LAYERS = 3, LLAMA.num_hidden_layers
STOP = StopSettings(max_new_tokens=24)
OFTEN = 0.05
"""A threshold with which some tokens of the tiny model leave."""


def fitted(
    agreed: Any, other: Any, posterior: float, count: int = 20_000, first: float = 0.9
) -> float | None:
    draw = np.random.default_rng(3)
    adaptive = AdaptiveThreshold(first, posterior)
    for said, kind in ((True, agreed), (False, other)):
        for confidence in kind.rvs(count, random_state=draw):
            adaptive.observe(float(confidence), said)
    adaptive.update()
    return adaptive.threshold


@pytest.mark.parametrize("posterior", [0.2, 0.4, 0.7, 0.95])
def test_the_threshold_is_where_two_known_distributions_have_the_posterior(
    posterior: float,
) -> None:
    agreed, other = stats.beta(8, 2), stats.beta(3, 3)
    found = fitted(agreed, other, posterior)
    assert found is not None and found > LOWEST
    densities = float(agreed.pdf(found)), float(other.pdf(found))
    assert densities[0] / sum(densities) == pytest.approx(posterior, abs=0.02)


def test_it_is_never_below_the_lowest_and_none_where_confidence_says_the_opposite() -> None:
    assert fitted(stats.beta(9, 1), stats.beta(1, 60), 0.4) == LOWEST
    assert fitted(stats.beta(2, 6), stats.beta(6, 2), 0.4) is None


def test_it_stays_until_enough_of_both_kinds_were_seen() -> None:
    agreed, other = stats.beta(8, 2), stats.beta(3, 3)
    assert fitted(agreed, other, 0.4, LEAST_PAIRS - 1, first=0.8) == 0.8
    assert fitted(agreed, other, 0.4, LEAST_PAIRS, first=0.8) != 0.8
    always = AdaptiveThreshold(0.8, 0.4)
    for _ in range(50):  # the same confidence again and again has no distribution
        always.observe(1.0, True)
        always.observe(0.0, False)
    always.update()
    assert always.threshold == 0.8


def test_confidences_of_nought_and_one_have_a_finite_fit() -> None:
    adaptive = AdaptiveThreshold(0.8, 0.4)
    for turn in range(100):
        adaptive.observe(1.0 if turn % 4 else 0.0, True)
        adaptive.observe(0.0 if turn % 4 else 1.0, False)
    adaptive.update()
    assert adaptive.threshold is None or math.isfinite(adaptive.threshold)


def step_of(decoder: Decoder, **settings: Any) -> DynamicDepthStep:
    method = spec.find("free")
    assert method.training is not None
    base = BaseShape.of(LLAMA)
    module = method.training.build(method.training.config_for(base, exits=[EXIT]), base)
    module.eval().requires_grad_(False)
    made = method.make_step(decoder, module, {"threshold": OFTEN, **settings})
    assert isinstance(made, DynamicDepthStep)
    return made


def observed(step: DynamicDepthStep) -> list[tuple[float, bool]]:
    """What the step's policy will be told from now on."""
    policy = step.policy
    assert isinstance(policy, AdaptiveExit)
    pairs: list[tuple[float, bool]] = []
    tell = policy._adaptive.observe

    def observe(confidence: float, agreed: bool) -> None:
        pairs.append((confidence, agreed))
        tell(confidence, agreed)

    policy._adaptive.observe = observe  # type: ignore[method-assign]
    return pairs


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return HFDecoder(model_of(LLAMA))


def test_every_token_whose_layers_ran_is_told_once_with_the_truth(decoder: Decoder) -> None:
    """The truth: exit and last layer over the whole text, read at once."""
    step = step_of(decoder, adaptive=0.4)
    exit = step.policy
    assert isinstance(exit, AdaptiveExit)
    told = set()
    for prompt in PROMPTS:
        pairs = observed(step)
        exit._adaptive.threshold = OFTEN  # as for the first text
        text = generate(decoder, step, [prompt], stop=STOP).sequences[0]
        ids = torch.tensor([*prompt, *text])
        rows, cache = Rows.causal(0, 0, len(ids)), decoder.new_cache(1, len(ids))
        shallow = decoder.layers(decoder.embed(ids, rows.pos), rows, 0, EXIT, cache)
        deep = decoder.logits(decoder.layers(shallow, rows, EXIT, LAYERS, cache)).argmax(-1)
        said = exit.head.logits(exit.read(EXIT, shallow)).softmax(-1).max(-1)
        truth = [
            (confidence, bool(token == last))
            for confidence, token, last in zip(
                *map(torch.Tensor.tolist, (*said, deep)), strict=True
            )
        ]
        # the prompt's last token is read with the prompt; those that wait at the end are not told
        truth = truth[len(prompt) : len(prompt) + len(pairs)]
        assert len(pairs) > 10 and [agreed for _, agreed in pairs] == [a for _, a in truth]
        np.testing.assert_allclose([c for c, _ in pairs], [c for c, _ in truth], rtol=1e-3)
        told |= {agreed for _, agreed in pairs}
    assert told == {True, False}


def test_a_batch_tells_what_its_rows_tell_alone(decoder: Decoder) -> None:
    together, apart = step_of(decoder, adaptive=0.4), []
    pairs = observed(together)
    text = generate(decoder, together, PROMPTS, stop=STOP).sequences
    for row, prompt in enumerate(PROMPTS):
        alone = step_of(decoder, adaptive=0.4)
        told = observed(alone)
        assert generate(decoder, alone, [prompt], stop=STOP).sequences[0] == text[row] and told
        apart += told
    np.testing.assert_allclose(sorted(pairs), sorted(apart), rtol=1e-3)


def test_the_threshold_moves_between_texts_only(decoder: Decoder) -> None:
    fixed, moving = step_of(decoder), step_of(decoder, adaptive=0.4)
    exit = moving.policy
    assert isinstance(exit, AdaptiveExit)
    first = generate(decoder, fixed, PROMPTS, stop=STOP)
    assert generate(decoder, moving, PROMPTS, stop=STOP).sequences == first.sequences
    assert exit.threshold(EXIT, 0) == OFTEN
    # from now on the exit is trusted nowhere: it was told that it is wrong where it is sure
    for confidence in np.linspace(0.01, 0.99, 2000):
        exit._adaptive.observe(float(confidence), False)
        exit._adaptive.observe(float(confidence) / 20, True)
    out = generate(decoder, moving, PROMPTS, stop=STOP)
    plain = generate(decoder, step_of(decoder, threshold=None), PROMPTS, stop=STOP)
    assert exit.threshold(EXIT, 0) is None and out.sequences == plain.sequences
    assert set(out.stats.exits) == {LAYERS}


def test_what_it_cannot_use_is_refused() -> None:
    for value in (0.0, 1.0, -1.0):
        with pytest.raises(UserError, match=r"adaptive.*null or a number above 0 and below 1"):
            FreeDecodeConfig(adaptive=value)
    for others in ({"threshold": None}, {"kv": "propagate"}):
        with pytest.raises(UserError, match=r"adaptive.*a threshold and kv=deferred"):
            FreeDecodeConfig(adaptive=0.4, **others)  # type: ignore[arg-type]
