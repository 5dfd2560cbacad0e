"""Greedy: speculative == plain == transformers' generate, token for token in fp32, whatever is
drafted.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decoding.invariants import check_invariants
from multirate.decoding.logits import SamplingSettings
from multirate.decoding.loop import generate
from multirate.decoding.plain import PlainStep
from multirate.decoding.session import Session
from multirate.decoding.speculate.step import SpeculativeStep
from multirate.decoding.step import Step
from multirate.decoding.stopping import StopSettings

from .helpers import KINDS, ScriptedDrafter, oracle, reference, scripts, tiny

PROMPTS = [[3, 7, 1, 9], [5], [2, 2, 8, 4, 11, 6, 1]]


@pytest.mark.parametrize("seed", range(4))
def test_plain_decoding_is_generate(seed: int) -> None:
    model, decoder = tiny(seed)
    expected = [reference(model, p, 20) for p in PROMPTS]
    assert len({t for s in expected for t in s}) > 3, (
        "the tiny model's output is too dull to show an error"
    )
    out = generate(decoder, PlainStep(), PROMPTS, stop=StopSettings(max_new_tokens=20))
    assert out.sequences == expected
    assert out.finish_reasons == ["length"] * 3
    assert out.stats.tokens_per_step == 1
    assert (
        generate(decoder, PlainStep(), PROMPTS[:1], stop=StopSettings(max_new_tokens=20)).sequences
        == expected[:1]
    )


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 3),
    kind=st.sampled_from(KINDS),
    start=st.integers(0, 3),
    lazy=st.booleans(),
    batch=st.sampled_from([1, 3]),
    count=st.integers(1, 24),
    draft_seed=st.integers(0, 99),
)
def test_speculative_is_generate(
    seed: int, kind: str, start: int, lazy: bool, batch: int, count: int, draft_seed: int
) -> None:
    model, decoder = tiny(seed)
    prompts = PROMPTS[:batch]
    futures = oracle(model, prompts)
    drafter = ScriptedDrafter(
        scripts(kind, futures, 13, draft_seed), decoder if start else None, start, lazy
    )
    steps = 0

    def after_step(session: Session, step: Step) -> None:
        nonlocal steps
        steps += 1
        if steps % 3 == 1:
            check_invariants(session, step)

    streamed: list[list[int]] = [[] for _ in prompts]
    out = generate(
        decoder,
        SpeculativeStep(drafter),
        prompts,
        stop=StopSettings(max_new_tokens=count),
        on_tokens=lambda b, tokens: streamed[b].extend(tokens),
        after_step=after_step,
    )
    assert out.sequences == [
        f[len(p) : len(p) + count] for f, p in zip(futures, prompts, strict=True)
    ]
    assert streamed == out.sequences
    assert out.finish_reasons == ["length"] * batch
    stats = out.stats
    assert stats.tokens == batch * count
    assert stats.accepted + stats.sequence_steps >= stats.tokens - stats.first_tokens
    if kind == "right" and count > 10:
        assert stats.tokens_per_step > 3
        assert stats.acceptance == 1
    if kind in ("wrong", "empty"):
        assert stats.tokens_per_step in (0, 1)
        assert stats.accepted == 0


@pytest.mark.parametrize("kind", ["right", "tree", "half_right"])
def test_drafter_sees_the_final_residuals_of_exactly_the_cached_tokens(kind: str) -> None:
    model, decoder = tiny(1)
    prompts = PROMPTS
    futures = oracle(model, prompts)
    drafter = ScriptedDrafter(scripts(kind, futures, 13, 5), decoder, 1)
    states: list[list[torch.Tensor]] = []

    def after_step(session: Session, step: Step) -> None:
        states.append([torch.cat(drafter.finals[b]) for b in range(3)])

    generate(
        decoder,
        SpeculativeStep(drafter),
        prompts,
        stop=StopSettings(max_new_tokens=15),
        after_step=after_step,
    )
    for b, future in enumerate(futures):
        with torch.no_grad():
            full = model.lm_head(model.model(torch.tensor([future])).last_hidden_state)[0]
        for finals in states:
            ours = decoder.logits(finals[b])
            assert torch.allclose(ours, full[: len(ours)], atol=1e-4)


@pytest.mark.parametrize("kind", ["half_right", "tree"])
@pytest.mark.parametrize("start", [0, 2])
def test_repetition_penalty_is_generate(kind: str, start: int) -> None:
    model, decoder = tiny(2)
    sampling = SamplingSettings(repetition_penalty=1.7)
    expected = [reference(model, p, 18, repetition_penalty=1.7) for p in PROMPTS]
    assert expected != [reference(model, p, 18) for p in PROMPTS]
    stop = StopSettings(max_new_tokens=18)
    assert generate(decoder, PlainStep(), PROMPTS, sampling, stop).sequences == expected
    futures = [[*p, *e] for p, e in zip(PROMPTS, expected, strict=True)]
    drafter = ScriptedDrafter(scripts(kind, futures, 13, 3), decoder if start else None, start)
    out = generate(decoder, SpeculativeStep(drafter), PROMPTS, sampling, stop)
    assert out.sequences == expected
    assert out.stats.accepted > 0


def test_long_prompts_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model, decoder = tiny(0)
    prompts = [[(7 * i + b) % 13 for i in range(n)] for b, n in enumerate((11, 3, 8))]
    monkeypatch.setattr("multirate.decoding.prefill.PREFILL_ROWS", 4)
    out = generate(decoder, PlainStep(), prompts, stop=StopSettings(max_new_tokens=6))
    assert out.sequences == [reference(model, p, 6) for p in prompts]
