"""The sampling pipeline equals transformers' processors; settings refuse what they cannot mean."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from multirate.decoding.logits import SamplingSettings, adjusted
from multirate.decoding.sampler import Sampler
from multirate.errors import UserError

from .helpers import distribution

MODEL, VOCAB = (
    tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            intermediate_size=8,
        )
    ),
    700,
)


def theirs(logits: torch.Tensor, contexts: list[list[int]], s: SamplingSettings) -> torch.Tensor:
    """What `generate` would draw from: its own processor list, in its own order."""
    config = tf.GenerationConfig(
        do_sample=True,
        temperature=s.temperature,
        top_k=s.top_k,
        top_p=s.top_p,
        min_p=s.min_p or None,
        repetition_penalty=s.repetition_penalty,
    )
    processors = MODEL._get_logits_processor(
        generation_config=config, device="cpu", model_kwargs={}
    )
    rows = [
        processors(torch.tensor([c]), row[None].clone())
        for c, row in zip(contexts, logits, strict=True)
    ]
    return torch.softmax(torch.cat(rows), dim=-1)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([5, 40, VOCAB]),
    rows=st.integers(1, 4),
    scale=st.sampled_from([0.3, 2.0, 8.0]),
    temperature=st.sampled_from([0.3, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 3, 50, 600]),
    top_p=st.sampled_from([0.05, 0.37, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.4, 1.0]),
    penalty=st.sampled_from([0.7, 1.0, 1.6]),
)
def test_distribution_is_transformers(
    seed: int,
    vocab: int,
    rows: int,
    scale: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * scale
    contexts = [torch.randint(vocab, (3 + r,), generator=generator).tolist() for r in range(rows)]
    s = SamplingSettings(temperature, top_k, top_p, min_p, penalty)
    ours, expected = distribution(logits, s, contexts), theirs(logits, contexts, s)
    assert torch.allclose(ours.sum(-1), torch.ones(rows), atol=1e-5)
    # a token exactly on the border of top-p may fall either way with the order of a float sum
    border = 1e-5 / max(min(top_p, 1 - top_p), 1e-3) if top_p < 1 else 0.0
    same_support = ((ours > 0) == (expected > 0)).all()
    assert same_support or (ours - expected).abs().max() < border
    if same_support:
        assert torch.allclose(ours, expected, atol=1e-5)


def test_ties_at_the_border_of_top_k_stay() -> None:
    probs = distribution(torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]]), SamplingSettings(1.0, top_k=2))
    assert (probs > 0).tolist() == [[False, True, True, True, False]]


def test_context_ids_outside_the_head_are_ignored() -> None:
    logits = torch.tensor([[1.0, -1.0, 0.5]])
    s = SamplingSettings(repetition_penalty=3.0)
    assert int(adjusted(logits, s, [[0, 99]]).argmax()) == 2
    assert int(adjusted(logits, SamplingSettings(), None).argmax()) == 0


def test_logits_that_overflowed_are_refused() -> None:
    sampler = Sampler(SamplingSettings(1.0, seed=4), [[1]])
    with pytest.raises(UserError, match="not finite"):
        sampler.choose(torch.tensor([[0.5, float("nan")]]), [0])


def test_streams_belong_to_sequences_and_seeds() -> None:
    logits = torch.zeros(1, 1000)
    one = Sampler(SamplingSettings(1.0, seed=4), [[1], [1]])
    again = Sampler(SamplingSettings(1.0, seed=4), [[1], [1]])
    first = [one.choose(logits, [0])[0] for _ in range(5)]
    other = [one.choose(logits, [1])[0] for _ in range(5)]
    assert other != first
    assert [again.choose(logits, [1])[0] for _ in range(5)] == other
    assert [again.choose(logits, [0])[0] for _ in range(5)] == first
    torch.manual_seed(3)
    a = Sampler(SamplingSettings(1.0), [[1]]).choose(logits, [0])
    b = Sampler(SamplingSettings(1.0), [[1]]).choose(logits, [0])
    torch.manual_seed(3)
    assert Sampler(SamplingSettings(1.0), [[1]]).choose(logits, [0]) == a != b


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_k", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
        ("seed", -1),
        ("seed", "x"),
        ("seed", 2**63),
        ("repetition_penalty", 10**400),
    ],
)
def test_settings_refuse(field: str, value: object) -> None:
    with pytest.raises(UserError, match=field) as caught:
        SamplingSettings(**{field: value})  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)
    assert "accepted: " in str(caught.value)
