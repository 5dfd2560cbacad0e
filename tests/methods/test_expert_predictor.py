"""The accelerated residual predicts experts: untrained it is the next layer's gate, trained it is
better.
"""

from __future__ import annotations

from typing import Any

import torch

from multirate.methods._shared.teacher import Teacher
from multirate.methods.m2r2_experts.config import ExpertPredictorConfig
from multirate.methods.m2r2_experts.modules import ExpertPredictor
from multirate.methods.m2r2_experts.train import ExpertPredictorObjective

from .tiny import base, disturb, ids


def built(ahead: int = 2, **options: Any) -> tuple[Teacher, ExpertPredictor]:
    teacher = Teacher(base("mixtral"))
    config = ExpertPredictorConfig.for_base(teacher.shape, rank=16, ahead=ahead, **options)
    torch.manual_seed(0)
    return teacher, ExpertPredictor(config, teacher.shape)


def recalls(objective: ExpertPredictorObjective, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        _, report = objective(tokens, torch.ones_like(tokens, dtype=torch.bool))
    return report.result.agree.float().mean(1)


def test_untrained_it_is_the_gate_of_the_later_layer() -> None:
    teacher, predictor = built()
    objective = ExpertPredictorObjective(teacher, predictor)
    tokens = ids(2, 20)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    terms, exit_ = objective.early_exit(tokens, mask)
    assert terms == objective.terms
    assert [(t.gate, t.step) for t in terms] == [(1, 1), (2, 1), (3, 1), (2, 2), (3, 2)]
    _, report = objective(tokens, mask)
    assert torch.equal(report.result.agree, exit_.agree)
    assert report.sums().shape[0] == len(terms)


def test_the_truth_is_named_with_certainty() -> None:
    """Given the true residual of the later layer, recall is 1 and KL 0: the report measures what it
    says.
    """
    teacher, predictor = built(ahead=1)
    objective = ExpertPredictorObjective(teacher, predictor)
    tokens = ids(2, 12)
    rows, _ = objective._residuals(tokens, torch.ones_like(tokens, dtype=torch.bool))
    _, report = objective._judge(rows, [[row] for row in [*rows[1:], rows[-1]]])
    assert report.result.agree.all()
    assert report.result.kl.abs().max() < 1e-5
    torch.testing.assert_close(report.result.overlap, torch.ones(3))


def test_training_raises_recall() -> None:
    teacher, predictor = built(ahead=1)
    objective = ExpertPredictorObjective(teacher, predictor)
    optimizer = torch.optim.Adam(predictor.parameters(), lr=5e-3)
    mask = torch.ones(4, 40, dtype=torch.bool)
    before = recalls(objective, ids(4, 40, seed=99))
    frozen = [p.clone() for p in teacher.parts.model.parameters()]
    for step in range(60):
        loss, _ = objective(ids(4, 40, seed=step), mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = recalls(objective, ids(4, 40, seed=99))
    assert after.mean() > before.mean() + 0.05, (before, after)
    assert all(
        torch.equal(p, q) for p, q in zip(frozen, teacher.parts.model.parameters(), strict=True)
    )


def test_the_state_is_carried_from_layer_to_layer() -> None:
    _, predictor = built()
    disturb(predictor)
    r, routing = torch.randn(3, 32), (torch.tensor([[0, 1], [1, 3], [2, 0]]), torch.rand(3, 2))
    alone = predictor.step(2, r, None, None, routing)
    carried = predictor.step(2, r, torch.randn(3, 32), None, routing)
    assert len(alone) == 2 and not torch.allclose(alone[0], carried[0])


def test_a_sketch_is_of_the_experts_that_run() -> None:
    """By its definition, an expert at a time; the pruned experts of others change nothing."""
    _, predictor = built(ahead=1)
    disturb(predictor)
    assert predictor.sketch is not None
    rows, rank = predictor.config.sketch, predictor.config.rank
    r, experts, weights = torch.randn(1, 32), torch.tensor([[3, 1]]), torch.tensor([[0.6, 0.2]])
    with torch.no_grad():
        found = predictor.step(1, r, None, None, (experts, weights))[0]
        x = r / r.square().mean().sqrt()
        expected = (
            r
            + torch.nn.functional.silu(
                torch.cat([x, torch.zeros_like(x)], -1) @ predictor.down[1].T
            )
            @ predictor.up[0][1][:, :rank].T
        )
        for expert, share in ((3, 0.75), (1, 0.25)):
            part = slice(expert * rows, (expert + 1) * rows)
            drawn = torch.nn.functional.silu(x @ predictor.sketch[1][part].T)
            expected = expected + share * drawn @ predictor.up[0][1][:, rank:][:, part].T
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        predictor.sketch[1][2 * rows : 3 * rows] += 5.0
        assert torch.equal(predictor.step(1, r, None, None, (experts, weights))[0], found)
