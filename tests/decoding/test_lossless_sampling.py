"""Sampling: what is emitted has the base model's distribution, whoever drafts; and the test would
notice if not.

Seeds are fixed; a test fails below p = 1e-6, so a false alarm (all cases together) has a chance
below 1e-4.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf

from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.speculate.acceptance import accept_greedy
from multirate.decoding.speculate.drafter import Draft, Drafter, DraftRequest
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.stopping import StopSettings
from multirate.methods.spec import find

from .helpers import pearson, random_tree, tiny

ALARM = 1e-6
VOCAB, NEW = 6, 3
PROMPT = [3, 1, 2, 3]


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """χ² of the joint counts and of the first and last one or two tokens' marginals,
    Bonferroni-corrected.

    The joint has many cells, hence little power against a fault in one token; the marginals make up
    for it.
    """
    tests = [pearson(counts, probs)]
    for drop in range(1, counts.ndim):
        axes = tuple(range(counts.ndim - drop, counts.ndim))
        tests.append(pearson(counts.sum(axes), probs.sum(axes)))
        tests.append(pearson(counts.sum(tuple(range(drop))), probs.sum(tuple(range(drop)))))
    return min(1.0, min(tests) * len(tests))


def analytic(sampling: SamplingSettings, seed: int) -> np.ndarray:
    """P(t1, t2, t3) [V, V, V] by transformers alone: its forward pass and its logits processors."""
    model, _ = tiny(seed, vocab=VOCAB)
    config = tf.GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p or None,
        repetition_penalty=sampling.repetition_penalty,
    )
    processors = model._get_logits_processor(
        generation_config=config, device="cpu", model_kwargs={}
    )
    joint = np.ones([VOCAB] * NEW)
    for depth in range(NEW):
        grid = np.array(list(np.ndindex(*[VOCAB] * depth)), dtype=np.int64).reshape(
            VOCAB**depth, depth
        )
        ids = torch.tensor(np.concatenate([np.tile(PROMPT, (len(grid), 1)), grid], axis=1))
        with torch.no_grad():
            scores = processors(ids, model(ids).logits[:, -1].clone())
        probs = torch.softmax(scores, -1).double().numpy().reshape([VOCAB] * (depth + 1))
        joint *= probs.reshape([VOCAB] * (depth + 1) + [1] * (NEW - depth - 1))
    return joint


def counted(sequences: list[list[int]]) -> np.ndarray:
    counts = np.zeros([VOCAB] * NEW)
    for sequence in sequences:
        counts[tuple(sequence)] += 1
    return counts


class Adversary(Drafter):
    """Drafts that have nothing to do with the model's text, or are its worst enemy."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.rng = np.random.default_rng(11)

    def draft(self, request: DraftRequest) -> list[Draft]:
        return [self._draft(token) for token in request.last_tokens]

    def _draft(self, last: int) -> Draft:
        if self.kind == "tree":
            return Draft(*random_tree(self.rng, 7, VOCAB))
        if self.kind == "one_hot":  # always the same
            return Draft.chain([2, 2, 2])
        if self.kind == "last":  # what would be repeated
            return Draft.chain([last, last])
        return Draft.chain(self.rng.integers(0, VOCAB, 2).tolist())


SETTINGS = {
    "plain": SamplingSettings(1.0, seed=1),
    "hot": SamplingSettings(2.5, seed=2),
    "top_k": SamplingSettings(1.3, top_k=3, seed=3),
    "top_p": SamplingSettings(1.2, top_p=0.8, seed=4),
    "min_p": SamplingSettings(1.2, min_p=0.25, seed=5),
    "penalty": SamplingSettings(1.0, repetition_penalty=2.0, seed=6),
    "all": SamplingSettings(1.5, top_k=5, top_p=0.9, min_p=0.05, repetition_penalty=1.4, seed=7),
}
KINDS = ["uniform", "last", "tree", "one_hot"]
CASES = [
    (s, k)
    for i, s in enumerate(SETTINGS)
    for k in (KINDS if s in ("plain", "all") else KINDS[i % 2 :: 2])
]


def sampled(settings: SamplingSettings, drafter: Drafter, count: int = 1200) -> np.ndarray:
    _, decoder = tiny(5, vocab=VOCAB)
    out = generate(
        decoder,
        SpeculativeStep(drafter),
        [PROMPT] * count,
        settings,
        StopSettings(max_new_tokens=NEW),
    )
    return counted(out.sequences)


@pytest.mark.parametrize(("setting", "kind"), CASES)
def test_distribution_is_kept(setting: str, kind: str) -> None:
    assert (
        p_value(sampled(SETTINGS[setting], Adversary(kind)), analytic(SETTINGS[setting], 5)) > ALARM
    )


@pytest.mark.parametrize("setting", ["plain", "all"])
def test_plain_decoding_has_it_too(setting: str) -> None:
    _, decoder = tiny(5, vocab=VOCAB)
    out = generate(
        decoder, PlainStep(), [PROMPT] * 1200, SETTINGS[setting], StopSettings(max_new_tokens=NEW)
    )
    assert p_value(counted(out.sequences), analytic(SETTINGS[setting], 5)) > ALARM


@pytest.mark.parametrize("setting", ["plain", "top_p", "all"])
@pytest.mark.parametrize(
    "name,config",
    [
        ("layerskip", {"exit_layer": 1, "confidence": 0.3}),
        ("prompt_lookup", {}),
        ("sam", {}),
        ("lookahead", {}),
    ],
)
def test_real_drafters_keep_it(setting: str, name: str, config: dict) -> None:  # type: ignore[type-arg]
    _, decoder = tiny(5, vocab=VOCAB)
    drafter = find(name).make_drafter(decoder, settings=config)
    assert drafter is not None
    assert p_value(sampled(SETTINGS[setting], drafter), analytic(SETTINGS[setting], 5)) > ALARM


def test_settings_on_the_draft_only_are_noticed() -> None:
    counts = sampled(SamplingSettings(1.0, seed=1), Adversary("uniform"))
    assert p_value(counts, analytic(SETTINGS["hot"], 5)) < ALARM


def test_greedy_walk() -> None:
    assert accept_greedy(Draft.chain([4, 5, 6]), [4, 5, 9, 1]) == ([0, 1, 2], 9)
    assert accept_greedy(Draft.chain([]), [7]) == ([0], 7)
    #        root → 1:4 → 3:6 → 5:8 ; root → 2:5 → 4:7
    tree = Draft([4, 5, 6, 7, 8], [0, 0, 1, 2, 3])
    assert accept_greedy(tree, [5, 0, 7, 0, 3, 0]) == ([0, 2, 4], 3)
    assert accept_greedy(tree, [4, 6, 0, 8, 0, 2]) == ([0, 1, 3, 5], 2)
    assert accept_greedy(tree, [9, 6, 0, 8, 0, 2]) == ([0], 9)
