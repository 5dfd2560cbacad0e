"""Sampled text is plain decoding's token for token, whoever drafts, as the random numbers belong to
places, and tokens have the distribution that they should.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from decoding.invariants import check_invariants
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.sampler import Sampler
from multirate.decoding.speculate.acceptance import accept_chosen
from multirate.decoding.speculate.drafter import Draft, Drafter, DraftRequest
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.stopping import StopSettings
from multirate.errors import UserError
from multirate.methods.spec import find
from multirate.runtime.noise import Noise

from .helpers import KINDS, ScriptedDrafter, distribution, pearson, scripts, tiny

PROMPTS = [[3, 7, 1, 9], [5], [2, 2, 8, 4, 11, 6, 1], [9, 9]]
SETTINGS = {
    "plain": SamplingSettings(1.0, seed=1),
    "cool": SamplingSettings(0.6, seed=2),
    "top_k": SamplingSettings(1.3, top_k=3, seed=3),
    "top_p": SamplingSettings(1.2, top_p=0.8, seed=4),
    "min_p": SamplingSettings(1.2, min_p=0.1, seed=5),
    "penalty": SamplingSettings(1.0, repetition_penalty=1.5, seed=6),
    "all": SamplingSettings(1.5, top_k=8, top_p=0.9, min_p=0.02, repetition_penalty=1.2, seed=7),
}


def futures(decoder: Any, sampling: SamplingSettings, batch: int) -> list[list[int]]:
    """Prompts and what plain decoding says after them."""
    stop = StopSettings(max_new_tokens=24)
    out = generate(decoder, PlainStep(), PROMPTS[:batch], sampling, stop)
    return [[*p, *new] for p, new in zip(PROMPTS[:batch], out.sequences, strict=True)]


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    setting=st.sampled_from(sorted(SETTINGS)),
    kind=st.sampled_from(KINDS),
    start=st.integers(0, 2),
    lazy=st.booleans(),
    batch=st.integers(1, 4),
    count=st.integers(1, 20),
    draft_seed=st.integers(0, 99),
)
def test_whatever_is_drafted(
    setting: str, kind: str, start: int, lazy: bool, batch: int, count: int, draft_seed: int
) -> None:
    """Chains and trees, right ones, wrong ones and what an enemy proposes."""
    _, decoder = tiny(1)
    true = futures(decoder, SETTINGS[setting], batch)
    drafter = ScriptedDrafter(
        scripts(kind, true, 13, draft_seed), decoder if start else None, start, lazy
    )
    out = generate(
        decoder,
        SpeculativeStep(drafter),
        PROMPTS[:batch],
        SETTINGS[setting],
        StopSettings(max_new_tokens=count),
        after_step=check_invariants,
    )
    assert out.sequences == [
        text[len(p) : len(p) + count] for text, p in zip(true, PROMPTS, strict=False)
    ]
    if kind == "right" and count > 10:
        assert out.stats.tokens_per_step > 3


METHODS = [
    ("layerskip", {"exit_layer": 1, "confidence": 0.1}),
    ("prompt_lookup", {}),
    ("sam", {}),
    ("lookahead", {}),
    ("token_recycling", {}),
]


@pytest.mark.parametrize("setting", sorted(SETTINGS))
@pytest.mark.parametrize(("name", "config"), METHODS)
def test_methods_without_training(setting: str, name: str, config: dict[str, Any]) -> None:
    _, decoder = tiny(2)
    stop = StopSettings(max_new_tokens=24, stop_strings=("3,4", "11"), decode=_spelt)
    for prompts in (PROMPTS[:1], PROMPTS[:2], PROMPTS):
        plain = generate(decoder, PlainStep(), prompts, SETTINGS[setting], stop)
        drafter = find(name).make_drafter(decoder, settings=config)
        assert drafter is not None
        out = generate(decoder, SpeculativeStep(drafter), prompts, SETTINGS[setting], stop)
        assert out.sequences == plain.sequences
        assert out.finish_reasons == plain.finish_reasons


def _spelt(tokens: list[int]) -> str:
    return "".join(f"{token}," for token in tokens)


class Meddler(Drafter):
    """Asks for random numbers of every place, in any order, and drafts nothing of use."""

    def draft(self, request: DraftRequest) -> list[Draft]:
        for b in request.seqs:
            for ahead in (5, 0, 2):
                request.sampler.noises([b], [ahead])
        return [Draft.chain([0, 0]) for _ in request.seqs]


def test_who_asks_for_random_numbers_changes_none() -> None:
    _, decoder = tiny(1)
    true = futures(decoder, SETTINGS["plain"], 3)
    stop = StopSettings(max_new_tokens=20)
    step = SpeculativeStep(Meddler())
    out = generate(decoder, step, PROMPTS[:3], SETTINGS["plain"], stop)
    assert out.sequences == [t[len(p) : len(p) + 20] for t, p in zip(true, PROMPTS, strict=False)]


def test_a_wrong_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a draft that took the random numbers of the place before."""
    _, decoder = tiny(1)
    true = futures(decoder, SETTINGS["plain"], 1)
    right: Callable[..., list[Noise] | None] = Sampler.noises

    def one_before(self: Sampler, seqs: Sequence[int], ahead: Sequence[int]) -> list[Noise] | None:
        return right(self, seqs, [max(place - 1, 0) for place in ahead])

    monkeypatch.setattr(Sampler, "noises", one_before)
    drafter = ScriptedDrafter(scripts("right", true, 13, 0))
    stop = StopSettings(max_new_tokens=20)
    out = generate(decoder, SpeculativeStep(drafter), PROMPTS[:1], SETTINGS["plain"], stop)
    assert [*PROMPTS[0], *out.sequences[0]] != true[0][: len(PROMPTS[0]) + 20]


def test_drafts_that_use_the_same_numbers_agree_as_often_as_is_known() -> None:
    """At least (1 − TV) / (1 + TV) of the time, at most 1 − TV [Daliri, Musco, Suresh 2024]."""
    rng, count = np.random.default_rng(0), 4000
    p, q = (torch.tensor(rng.dirichlet(np.full(20, 0.5))).float()[None] for _ in range(2))
    sampler = Sampler(SamplingSettings(1.0, seed=3), [[1]])
    agreed = 0
    for _ in range(count):
        agreed += sampler.choose(p.log(), [0]) == sampler.choose(q.log(), [0])
        sampler.tokens[0].append(0)
    overlap = float(torch.minimum(p, q).sum())
    margin = 4 * 0.5 / count**0.5
    assert overlap / (2 - overlap) - margin < agreed / count < overlap + margin


def test_rows_that_are_not_reached_are_not_chosen() -> None:
    logits = torch.full((4, 5), float("nan"))
    logits[0], logits[2] = torch.tensor([0.0, 0, 0, 0, 40]), torch.tensor([0.0, 40, 0, 0, 0])
    sampler = Sampler(SamplingSettings(1.0, seed=0), [[1]])
    draft = Draft([2, 4, 3], [0, 0, 2])
    assert accept_chosen(sampler, [0], [draft], logits) == [([0, 2], 1)]
    with pytest.raises(UserError, match="not finite"):
        accept_chosen(sampler, [0], [Draft([4, 4], [0, 0])], logits)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_tokens_have_the_distribution_of_the_logits(temperature: float) -> None:
    """χ² of what is chosen, place after place and sequence after sequence."""
    sampler = Sampler(SamplingSettings(temperature, seed=11), [[1]] * 20)
    logits = torch.randn(40, generator=torch.Generator().manual_seed(2))[None] * 2
    counts = np.zeros(40)
    for _ in range(400):
        for token in sampler.choose(logits.expand(20, -1), list(range(20))):
            counts[token] += 1
        for tokens in sampler.tokens:
            tokens.append(0)
    assert pearson(counts, torch.softmax(logits[0].double() / temperature, -1).numpy()) > 1e-6


@pytest.mark.parametrize("top_p", [0.3, 0.9])
def test_dropped_tokens_are_never_chosen(top_p: float) -> None:
    """χ² of what is chosen against the distribution that top-p leaves."""
    sampling = SamplingSettings(1.3, top_p=top_p, seed=1)
    sampler = Sampler(sampling, [[1]])
    logits = torch.tensor([[1.0, 0.5, -0.3, 2.0, -4.0, 0.9]])
    counts = np.zeros(6)
    for _ in range(3000):
        counts[sampler.choose(logits, [0])[0]] += 1
        sampler.tokens[0].append(0)
    expected = distribution(logits, sampling)[0].double().numpy() * 3000
    assert not counts[expected == 0].any()
    kept = expected > 0
    if kept.sum() > 1:
        assert stats.chisquare(counts[kept], expected[kept] * 3000 / expected.sum()).pvalue > 1e-6
