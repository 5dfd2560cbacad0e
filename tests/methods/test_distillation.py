"""The chunked KL against plain autograd, and the figures drawn from it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from multirate.methods._shared import distillation
from multirate.methods._shared.distillation import (
    Head,
    TopTokens,
    distil,
    simulated_tokens_per_step,
)
from multirate.methods._shared.objective import (
    BINS,
    auc,
    balanced_bce,
    expected_calibration_error,
)
from multirate.methods.m2r2.arla import ARLA


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(
    "softcap,scale,bias",
    [(None, 1.0, False), (3.0, 0.7, True)],
)
def test_gradient_is_that_of_the_plain_loss(
    monkeypatch: pytest.MonkeyPatch,
    softcap: float | None,
    scale: float,
    bias: bool,
    reduced: bool,
) -> None:
    monkeypatch.setattr(
        distillation, "ELEMENTS_PER_CHUNK", 16 * 37
    )  # 16 rows at a time: chunks and a rest
    torch.manual_seed(0)
    vocabulary, size, rows, count = 37, 12, 41, 3
    head = Head(
        torch.randn(vocabulary, size),
        torch.randn(vocabulary) if bias else None,
        scale,
        softcap,
    )
    teacher = torch.randn(rows, size)
    tokens = torch.randperm(vocabulary)[:20].sort().values if reduced else None
    students = torch.randn(count, rows, size, requires_grad=True)
    weight = torch.tensor([1.0, 0.5, 0.2])
    result = distil(students, teacher, head, tokens)
    (weight * result.kl).sum().backward()
    got, students.grad = students.grad, None

    def logits(x: torch.Tensor) -> torch.Tensor:
        z = x @ head.weight.T
        z = (z if head.bias is None else z + head.bias) * scale
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        return z if tokens is None else z[..., tokens]

    log_p, log_q = logits(teacher).log_softmax(-1), logits(students).log_softmax(-1)
    plain = (
        F.kl_div(log_q, log_p.expand_as(log_q), log_target=True, reduction="none").sum(-1).mean(-1)
    )
    (weight * plain).sum().backward()
    torch.testing.assert_close(result.kl, plain, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got, students.grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(
        result.overlap, torch.minimum(log_p.exp(), log_q.exp()).sum(-1).mean(-1)
    )
    torch.testing.assert_close(result.confidence, log_q.exp().amax(-1).detach())
    choice = log_q.argmax(-1) if tokens is None else tokens[log_q.argmax(-1)]
    assert torch.equal(result.agree, choice == head.logits(teacher).argmax(-1))


@pytest.mark.parametrize("reduced", [False, True])
def test_a_teacher_given_by_its_likeliest_tokens(
    monkeypatch: pytest.MonkeyPatch, reduced: bool
) -> None:
    monkeypatch.setattr(distillation, "ELEMENTS_PER_CHUNK", 16 * 20)
    torch.manual_seed(0)
    vocabulary, size, rows, k = 37, 12, 41, 6
    head = Head(torch.randn(vocabulary, size))
    full = (torch.randn(rows, size) @ head.weight.T).log_softmax(-1)
    log_probs, ids = full.topk(k)
    tokens = torch.randperm(vocabulary)[:20].sort().values if reduced else None
    students = torch.randn(2, rows, size, requires_grad=True)
    result = distil(students, TopTokens(ids, log_probs), head, tokens)
    result.kl.sum().backward()
    got, students.grad = students.grad, None

    # the same with the kept tokens' distribution written out over the whole vocabulary
    sparse = torch.full_like(full, -torch.inf).scatter(1, ids, log_probs)
    z = students @ head.weight.T
    if tokens is not None:
        sparse, z = sparse[:, tokens], z[..., tokens]
    taught = sparse.amax(-1) > -torch.inf
    assert taught.any()
    p = sparse[taught].softmax(-1)
    log_q = z.log_softmax(-1)[:, taught]
    plain = (torch.xlogy(p, p) - p * log_q).sum((-1, -2)) / rows
    plain.sum().backward()
    torch.testing.assert_close(result.kl, plain, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got, students.grad, atol=1e-6, rtol=1e-4)
    overlap = torch.minimum(p, log_q.exp()).sum((-1, -2)) / rows
    torch.testing.assert_close(result.overlap, overlap.detach())
    choice = z.argmax(-1) if tokens is None else tokens[z.argmax(-1)]
    assert torch.equal(result.agree, choice == ids[:, 0])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7))
def test_simulated_tokens(agreement: list[float]) -> None:
    expected = 1.0
    for k in range(1, 6):
        product = 1.0
        for s in range(k):
            product *= agreement[s] if s < len(agreement) else agreement[-1]
        expected += product
    assert simulated_tokens_per_step(agreement) == pytest.approx(expected)


def test_auc_and_calibration_against_their_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    score = torch.rand(300, generator=generator)
    hit = torch.rand(300, generator=generator) < score  # well calibrated by construction
    hits, misses = (torch.histc(score[w], BINS, 0, 1).double() for w in (hit, ~hit))
    pairs = (score[hit][:, None] > score[~hit][None, :]).float().mean().item()
    assert auc(hits, misses) == pytest.approx(pairs, abs=0.01)
    assert auc(hits, torch.zeros(BINS)) is None
    certain = torch.histc(torch.full((80,), 0.9), BINS, 0, 1).double()
    assert expected_calibration_error(certain * 0.5, certain * 0.5) == pytest.approx(0.4, abs=0.01)


def test_balanced_bce_weighs_classes_equally() -> None:
    logits = torch.tensor([2.0, -1.0, 0.5, 3.0])
    agree = torch.tensor([True, True, True, False])
    each = F.binary_cross_entropy_with_logits(logits, agree.float(), reduction="none")
    torch.testing.assert_close(balanced_bce(logits, agree), 0.5 * each[:3].mean() + 0.5 * each[3])


def test_arla_attends_to_earlier_gates() -> None:
    torch.manual_seed(0)
    arla = ARLA(16, 8, 3)
    rows = torch.randn(5, 3, 16)
    changed = rows.clone()
    changed[:, 0] += 1
    assert not torch.allclose(arla(rows), arla(changed))
    assert arla(rows[:, :2]).shape == (5,)
    assert ((arla.score(rows) > 0) & (arla.score(rows) < 1)).all()
