"""The accelerated residual on the kernel predicts what its module does; depth, and predictions
that are renewed."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from native_kernel import skip_without_kernel

from multirate.experts.depth import MeasuredDepth, depth_that_covers, depth_that_pays
from multirate.experts.expert_cache import ExpertCache, State
from multirate.experts.loader import ExpertLoader, Prediction
from multirate.experts.policies import eviction_policy
from multirate.experts.predictors import NextLayerGate, likeliest
from multirate.experts.reads import ThreadReads
from multirate.experts.stats import ExpertStats
from multirate.methods.m2r2_experts.config import ExpertPredictorConfig
from multirate.methods.m2r2_experts.modules import ExpertPredictor
from multirate.runtime.native.accelerated_residual import (
    NativeAcceleratedResidual,
    NativeResidualWithAttention,
)

SHAPE = SimpleNamespace(num_layers=5, hidden_size=128, is_moe=True, num_experts=6)


def expert_predictor(
    ahead: int, rank: int, sketch: int, attention: bool = False
) -> ExpertPredictor:
    torch.manual_seed(3)
    config = ExpertPredictorConfig(rank=rank, ahead=ahead, sketch=sketch, attention=attention)
    base: Any = SHAPE
    made = ExpertPredictor(config, base)
    with torch.no_grad():
        for up in made.up:
            up.normal_(0, 0.2)
    return made.requires_grad_(False)


@pytest.fixture
def native() -> None:
    """Skips where the kernel cannot be built."""
    skip_without_kernel()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize(("rank", "sketch"), [(8, 0), (64, 3), (16, 8)])
def test_the_kernels_residual_is_the_modules(ahead: int, rank: int, sketch: int) -> None:
    module = expert_predictor(ahead, rank, sketch)
    native = NativeAcceleratedResidual(module.down, list(module.up), module.sketch, sketch)
    for rows in (1, 3, 70):
        state: torch.Tensor | None = None
        for layer in range(SHAPE.num_layers):
            residual = torch.randn(rows, SHAPE.hidden_size)
            routing = (
                torch.stack([torch.randperm(6)[:2] for _ in range(rows)]),
                torch.rand(rows, 2) + 0.1,
            )
            exact = module.step(layer, residual, state, None, routing)
            ours = native.step(layer, residual, state, ahead, routing)
            assert len(ours) == ahead
            for a, b in zip(exact, ours, strict=True):
                assert (a - b).norm() < 0.01 * (a - residual).norm(), "bf16 of the same update"
            assert torch.equal(native.step(layer, residual, state, 1, routing)[0], ours[0])
            state = exact[0]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("rank", "sketch"), [(0, 3), (8, 8), (64, 1)])
def test_the_kernels_pruned_experts_are_the_modules(rank: int, sketch: int) -> None:
    module = expert_predictor(2, rank, sketch, attention=True)
    assert module.sketch is not None and module.gated is not None
    native = NativeResidualWithAttention(
        module.down, module.up[0], module.sketch, module.gated, sketch, 2
    )
    for rows in (1, 3, 70):
        for layer in (0, 3):
            residual = torch.randn(rows, SHAPE.hidden_size)
            routing = (
                torch.stack([torch.randperm(6)[:2] for _ in range(rows)]),
                torch.rand(rows, 2) + 0.1,
            )
            exact = (
                residual + module.features(layer, residual, None, routing) @ module.up[0][layer].T
            )
            ours = native.leaving(layer, residual, routing)
            assert (exact - ours).norm() < 0.01 * (exact - residual).norm(), (
                "bf16 of the same update"
            )


def test_predictions_are_ordered_by_how_many_rows_would_choose_them() -> None:
    found = likeliest(torch.tensor([[3, 1], [1, 2]]), 4)
    assert {one.key: one.chance for one in found} == {(4, 3): 1.0, (4, 1): 1.5, (4, 2): 0.5}
    assert {one.deadline for one in found} == {4}


def test_depth() -> None:
    assert depth_that_covers(1.0, 0.2, 4) == 1
    assert depth_that_covers(1.0, 2.5, 4) == 3
    assert depth_that_covers(1.0, 9.0, 4) == 4
    assert depth_that_covers(0.0, 9.0, 4) == 1
    assert depth_that_pays(0.01, 1.0, 4) == 4
    assert depth_that_pays(0.08, 1.0, 4) == 2
    assert depth_that_pays(0.2, 1.0, 4) == 1
    assert depth_that_pays(0.0, 1.0, 4) == 4


def test_depth_follows_what_is_measured() -> None:
    """Layers compute a second each; what they lack takes two."""
    predictor = NextLayerGate([lambda x: x] * 6)
    stats, now = ExpertStats(), 0.0
    depth = MeasuredDepth(predictor, rows=6, window=4, clock=lambda: now)

    def passes(count: int, stall: float, read: float) -> None:
        nonlocal now
        for _ in range(count):
            depth.new_pass(lambda: stats, 1)
            now += 6 + stall
            stats.uses += 1
            stats.stall_seconds += stall
            stats.read_seconds += read

    passes(6, 3, 12)
    assert predictor.depth == 2
    stats.predictor_seconds += 1e9  # predicting takes far longer than a layer
    passes(4, 3, 12)
    assert predictor.depth == 1
    depth.new_pass(lambda: stats, 30)  # a prompt
    passes(6, 0, 0)
    assert predictor.depth == 1


def test_statistics_of_a_phase() -> None:
    stats = ExpertStats(uses=5, hits=3, stall_seconds=1.0, events=[])
    before = stats.copy()
    stats.uses, stats.stall_seconds = 9, 1.5
    spent = stats.minus(before)
    assert (spent.uses, spent.hits, spent.stall_seconds, spent.events) == (4, 0, 0.5, None)
    total = ExpertStats(uses=1)
    total.add(spent)
    assert total.uses == 5


def test_what_is_not_named_again_is_not_read() -> None:
    record: Any = SimpleNamespace(layers=(0, 1, 2), record=SimpleNamespace(bytes=8))
    store: Any = SimpleNamespace(
        index=record, path="store", offset=lambda row, expert: 100 * row + expert
    )
    leave, offsets = threading.Semaphore(0), list[int]()

    def fill(slot: int, offset: int, begin: int, end: int) -> None:
        leave.acquire()
        offsets.append(offset)

    cache = ExpertCache(8, eviction_policy("lru"))
    stats, reads = ExpertStats(), ThreadReads(fill, 8, 1)
    with ExpertLoader(store, cache, reads, stats) as loader:
        loader.prefetch([Prediction((2, e), 2, 1.0 - e / 10) for e in (0, 1, 2)])
        while len(reads._queue) == 3:  # until the first is being read
            pass
        loader.prefetch([Prediction((2, e), 2, 1.0) for e in (2, 3)])
        for _ in range(8):
            leave.release()
        ready: set[Any] = set()
        while len(ready) < 3:
            loader.poll(0.1)
            ready = {slot.key for slot in cache.slots if slot.state is State.READY}
            if cache.occupied == len(ready):
                break
    assert {(2, 2), (2, 3)} <= ready and (2, 1) not in ready
    assert 201 not in offsets
    assert stats.cancelled >= 1
