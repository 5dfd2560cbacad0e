"""A predictor that runs the later layers' own attention: exact where its estimate of the stream is,
and causal.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from runtime.tiny_models import MOE, tiny_model
from torch import Tensor

from multirate.methods._shared.teacher import Teacher
from multirate.methods.m2r2_experts.config import ExpertPredictorConfig
from multirate.methods.m2r2_experts.modules import Arrival, ExpertPredictor
from multirate.methods.m2r2_experts.start import start_from_experts
from multirate.methods.m2r2_experts.train import ExpertPredictorObjective

from .test_expert_predictor import built, recalls
from .tiny import disturb, ids


def rows_of(tokens: Tensor, seed: int = 0) -> Tensor:
    """A mask with gaps, as that of a conversation's answers."""
    return torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < 0.7


@pytest.mark.parametrize("name", sorted(MOE))
def test_the_true_stream_arrives_where_the_base_does(name: str) -> None:
    """Given what really leaves a mixture, the residual at the next one's router is the base's own:
    with windows, sinks, clipped projections, and a dense layer on the way.
    """
    teacher = Teacher(tiny_model(name))
    config = ExpertPredictorConfig.for_base(teacher.shape, rank=4, ahead=1, attention=True)
    objective = ExpertPredictorObjective(teacher, ExpertPredictor(config, teacher.shape))
    tokens = ids(2, 14)
    mask = rows_of(tokens)
    rows, slow = objective._residuals(tokens, mask)
    entering = teacher.slow(tokens, shared=3, gates=(1, 2, 3)).residual
    onward = objective._onward(slow, mask)
    mixtures = [part.index for part in teacher.parts.layers if part.moe is not None]
    for place, (layer, following) in enumerate(pairwise(mixtures), start=1):
        arrival = onward(layer, entering[layer + 1][mask])
        assert arrival is not None and arrival.layer == following
        torch.testing.assert_close(arrival.residual, rows[place], atol=1e-4, rtol=1e-4)
    assert onward(mixtures[-1], rows[-1]) is None


def test_a_row_sees_no_other_estimate() -> None:
    """Changing what is thought of one token changes that token's arrival alone."""
    teacher, predictor = built(ahead=1, attention=True)
    objective = ExpertPredictorObjective(teacher, predictor)
    tokens = ids(1, 9)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    rows, slow = objective._residuals(tokens, mask)
    onward = objective._onward(slow, mask)
    other = rows[0].clone()
    other[3] += 1.0
    one, two = onward(0, rows[0]), onward(0, other)
    assert one is not None and two is not None
    changed = (one.residual - two.residual).abs().amax(1) > 1e-5
    assert changed.tolist() == [position == 3 for position in range(9)]


@pytest.mark.parametrize(("name", "neurons"), [("mixtral", 40), ("qwen3_moe", 24)])
def test_with_every_neuron_in_its_sketch_it_is_never_wrong(name: str, neurons: int) -> None:
    """A sketch of all of an expert's neurons is that expert, so every depth's residual is the true
    one.
    """
    teacher = Teacher(tiny_model(name))
    config = ExpertPredictorConfig.for_base(
        teacher.shape, rank=4, ahead=1, attention=True, sketch=neurons
    )
    predictor = ExpertPredictor(config, teacher.shape)
    tokens = ids(2, 16)
    start_from_experts(
        teacher, predictor, [(tokens, torch.ones_like(tokens, dtype=torch.bool), None)] * 2
    )
    assert recalls(ExpertPredictorObjective(teacher, predictor), ids(2, 20, seed=8)).min() > 0.99


def test_the_start_and_training_each_raise_recall() -> None:
    teacher, predictor = built(ahead=1, attention=True)
    objective = ExpertPredictorObjective(teacher, predictor)
    untrained = recalls(objective, ids(4, 40, seed=99)).mean()
    optimizer = torch.optim.Adam(predictor.parameters(), lr=5e-3)
    for step in range(60):
        loss, _ = objective(ids(4, 40, seed=step), torch.ones(4, 40, dtype=torch.bool))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert recalls(objective, ids(4, 40, seed=99)).mean() > untrained + 0.005
    assert all(p.grad is None for p in teacher.parts.model.parameters())
    _, started = built(ahead=1, attention=True)
    start_from_experts(
        teacher, started, [(ids(32, 40, seed=5), torch.ones(32, 40, dtype=torch.bool), None)]
    )
    assert (
        recalls(ExpertPredictorObjective(teacher, started), ids(4, 40, seed=99)).mean()
        > untrained + 0.005
    )


def test_depths_continue_the_same_stream() -> None:
    """Depth 2 from layer i is depth 1 from layer i + 1 of what depth 1 found."""
    _, predictor = built(ahead=2, attention=True)
    disturb(predictor)
    routing = (torch.tensor([[0, 1], [1, 3], [2, 0]]), torch.rand(3, 2))
    later = (torch.tensor([[2, 1], [0, 3], [1, 0]]), torch.rand(3, 2))

    def onward(layer: int, leaving: Tensor) -> Arrival | None:
        return None if layer == 2 else Arrival(layer + 1, 2 * leaving, later)

    r = torch.randn(3, 32)
    near, far = predictor.step(0, r, None, None, routing, onward)
    torch.testing.assert_close(predictor.step(1, near, None, 1, later, onward)[0], far)
    assert len(predictor.step(1, r, None, None, routing, onward)) == 1
