"""The fusion at a gate starts from least squares: the best linear map there is, and a better draft
than the base's early exit.
"""

from __future__ import annotations

import pytest
import torch

from multirate.methods._shared import least_squares
from multirate.methods._shared.distillation import TopTokens, distil
from multirate.methods._shared.layers import RMSNorm
from multirate.methods._shared.teacher import Known, Teacher
from multirate.methods.m2r2.config import M2R2Config
from multirate.methods.m2r2.modules import AcceleratedStream
from multirate.methods.m2r2.train import M2R2Objective, shift, start_from_least_squares

from .tiny import base, ids


def fused_stream(
    gates: tuple[int, ...] = (1,), preset: str = "m2r2-carry"
) -> tuple[Teacher, AcceleratedStream]:
    teacher = Teacher(base("llama"))
    torch.manual_seed(5)
    config = M2R2Config.for_base(teacher.shape, preset, rank=4, gates=gates, fuse=True)
    return teacher, AcceleratedStream(config, teacher.shape)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor, None]]:
    made = []
    for seed in range(count):
        tokens = ids(4, 12, seed=100 + seed)
        mask = torch.ones(tokens.shape, dtype=torch.bool)
        mask[:, :3] = False
        made.append((tokens, mask, None))
    return made


@pytest.mark.parametrize("gates", [(1,), (1, 3)])
@pytest.mark.parametrize("preset", ["m2r2", "m2r2-carry"])
def test_no_linear_map_tells_the_final_direction_better(
    gates: tuple[int, ...], preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(least_squares, "RIDGE", 1e-9)
    teacher, stream = fused_stream(gates, preset)
    start_from_least_squares(teacher, stream, batches(8))
    norm = RMSNorm(teacher.shape.hidden_size, teacher.shape.norm_eps)
    for gate in gates:
        read, direction = [], []
        for tokens, mask, _ in batches(8):
            slow = teacher.slow(tokens, shared=0, gates=gates)
            parts = [norm(slow.residual[gate]), norm(shift(slow.final))]
            if not stream.config.carry:
                parts.pop()
            read.append(torch.cat(parts, dim=-1)[mask])
            direction.append(torch.nn.functional.normalize(slow.final[mask], dim=-1))
        inputs = torch.cat(read)
        wanted = torch.cat(direction) * teacher.shape.hidden_size**0.5
        best = torch.linalg.lstsq(inputs, wanted).solution
        fusion = stream.fusions[str(gate)]
        weights = [fusion.stream.weight]
        if stream.config.carry:
            weights.append(fusion.carried.weight)
        found = torch.cat(weights, dim=1).T
        torch.testing.assert_close(inputs @ found, inputs @ best, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("preset, share", [("m2r2", 0.8), ("m2r2-carry", 0.5)])
def test_the_first_loss_is_below_the_early_exits(preset: str, share: float) -> None:
    teacher, stream = fused_stream(preset=preset)
    objective = M2R2Objective(teacher, stream)
    tokens, mask, _ = batches(40)[-1]
    before = objective(tokens, mask)[1].loss  # without ARLA, which starts as it does
    start_from_least_squares(teacher, stream, batches(39))  # not the batch that is measured
    after = objective(tokens, mask)[1].loss
    assert after < share * before


def test_what_is_known_of_the_samples_gives_the_same_start() -> None:
    online, kept = fused_stream(), fused_stream()
    given = batches(4)
    start_from_least_squares(*online, given)
    known = []
    for tokens, mask, _ in given:
        slow = kept[0].slow(tokens, shared=0)
        log_probs, best = kept[0].head.logits(slow.normed).log_softmax(-1).topk(5)
        known.append((tokens, mask, Known(slow.final, TopTokens(best, log_probs))))
    start_from_least_squares(*kept, known)
    for one, other in zip(
        online[1].fusions.parameters(), kept[1].fusions.parameters(), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_stream_without_fusions_is_left_alone() -> None:
    teacher = Teacher(base("llama"))
    stream = AcceleratedStream(M2R2Config.for_base(teacher.shape, "m2r2", rank=4), teacher.shape)
    before = {name: value.clone() for name, value in stream.state_dict().items()}
    start_from_least_squares(teacher, stream, batches(1))
    for name, value in stream.state_dict().items():
        assert torch.equal(value, before[name])


def test_rows_that_no_draft_token_covers_teach_nothing() -> None:
    head = Teacher(base("llama")).head
    rows, students = 3, torch.randn(1, 3, head.weight.shape[1], requires_grad=True)
    top = TopTokens(
        torch.tensor([[1, 2], [1, 30], [40, 41]]), torch.log(torch.full((rows, 2), 0.4))
    )
    distil(students, top, head, torch.arange(30, 50)).kl.sum().backward()
    assert students.grad is not None
    assert not students.grad[0, 0].any()
    assert students.grad[0, 1].any() and students.grad[0, 2].any()
