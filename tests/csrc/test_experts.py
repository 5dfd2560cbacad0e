"""Routers, experts and what is predicted of them (csrc/moe/experts.c, pruned.c) against PyTorch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from multirate.experts.packed import PackedRecords
from multirate.runtime.native import abi, library
from multirate.runtime.native.formats import BF16, Q4_K, Q5_1, Q6_K, Q8_0, QUANTISED, WeightFormat
from multirate.runtime.native.packing import Owner, interleave_gate_up, padded

from . import reference
from .harness import bf16_values, linear, pointer, randn
from .test_quantised import random_blocks

EPS = 1e-5
WIDTH, INNER, EXPERTS = 128, 96, 7


def routing(rows: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Different experts for each row, and positive weights."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:k] for _ in range(rows)])
    return ids, torch.rand(rows, k, generator=draw) + 0.1


def close(found: torch.Tensor, exact: torch.Tensor, share: float = 0.01) -> bool:
    """Whether they differ by rounding alone: the norm of the difference, beside the exact one."""
    return bool((found - exact).norm() <= share * exact.norm())


def route(
    workspace: library.Workspace,
    router: abi.CData,
    norm: torch.Tensor,
    x: torch.Tensor,
    k: int,
    normalise: bool,
    outputs: Sequence[torch.Tensor],
) -> None:
    """mr_route of one router over x [N, d]. outputs: normed, logits, ids and weights."""
    routers = abi.ffi.new("Linear *[]", [router])
    norms = abi.ffi.new("float *[]", [abi.tensor(norm)])
    names = ("normed", "logits", "ids", "weights")
    library.kernel().mr_route(
        workspace.address,
        abi.new(
            "Routers",
            routers=routers,
            norms=norms,
            eps=EPS,
            experts=EXPERTS,
            top_k=k,
            normalise=int(normalise),
            hidden=x.shape[1],
        ),
        0,
        pointer(x),
        len(x),
        abi.new("RoutedRows", **dict(zip(names, map(abi.tensor, outputs), strict=True))),
    )


@pytest.mark.parametrize("rows", [1, 4, 5, 61])
@pytest.mark.parametrize("normalise", [False, True])
def test_route(rows: int, normalise: bool) -> None:
    k, owner, workspace = 3, Owner(), library.Workspace(2)
    x, router = randn(rows, WIDTH), bf16_values(EXPERTS, WIDTH, seed=1)
    norm = torch.rand(WIDTH, generator=torch.Generator().manual_seed(2)) + 0.5
    normed, logits = torch.empty(rows, WIDTH), torch.empty(rows, padded(EXPERTS))
    ids, weights = torch.empty(rows, k, dtype=torch.int64), torch.empty(rows, k)
    outputs = (normed, logits, ids, weights)
    route(workspace, owner.linear(router), norm, x, k, normalise, outputs)
    exact_normed, _, _ = reference.route(x.double(), router.double(), norm.double(), EPS, k, True)
    assert close(normed, exact_normed, 1e-5)
    assert close(logits[:, :EXPERTS], exact_normed @ router.double().T)
    chances, chosen = logits[:, :EXPERTS].double().softmax(-1).topk(k)
    assert torch.equal(ids, chosen)
    if normalise:
        chances = chances / chances.sum(-1, keepdim=True)
    assert close(weights, chances, 1e-5)


def test_of_equally_likely_experts_the_lowest_comes_first() -> None:
    owner, workspace = Owner(), library.Workspace(1)
    router, x = torch.zeros(EXPERTS, WIDTH), randn(1, WIDTH)
    normed, logits = torch.empty(1, WIDTH), torch.empty(1, padded(EXPERTS))
    ids, weights = torch.empty(1, 2, dtype=torch.int64), torch.empty(1, 2)
    outputs = (normed, logits, ids, weights)
    route(workspace, owner.linear(router), torch.ones(WIDTH), x, 2, False, outputs)
    assert ids.tolist() == [[0, 1]]
    assert weights.tolist()[0] == pytest.approx([1 / EXPERTS] * 2)


@pytest.mark.parametrize("uses", [[1], [2, 1, 3], [59, 1, 2, 70, 5]])
def test_experts_and_their_sum(uses: list[int]) -> None:
    """Each expert computes its rows; calls of more than MAX_ROWS uses run in parts."""
    owner, workspace, draw = Owner(), library.Workspace(2), np.random.default_rng(0)
    rows, total = 6, sum(uses)
    x = bf16_values(rows, WIDTH, seed=9)
    packed, exact = [], []
    for e in range(len(uses)):
        gate, up = (bf16_values(INNER, WIDTH, seed=3 * e + i, scale=0.1) for i in (0, 1))
        down = bf16_values(WIDTH, INNER, seed=3 * e + 2, scale=0.1)
        gate_up = owner.linear(interleave_gate_up(gate, up))
        packed.append(abi.new("Expert", gate_up=gate_up, down=owner.linear(down)))
        exact.append([one.double() for one in (gate, up, down)])
    which = draw.integers(0, rows, total).astype(np.int32)
    places = draw.permutation(total).astype(np.int32)
    parts = torch.full((total, WIDTH), torch.nan)
    library.kernel().mr_experts(
        workspace.address,
        abi.ffi.new("Expert *[]", packed),
        abi.ints(np.array(uses, np.int32)),
        len(uses),
        pointer(x),
        abi.ints(which),
        abi.ints(places),
        pointer(parts),
    )
    use = 0
    for e, count in enumerate(uses):
        for _ in range(count):
            one = reference.expert(x[int(which[use])].double()[None], *exact[e])[0]
            assert close(parts[int(places[use])], one)
            use += 1


@pytest.mark.parametrize(
    "kinds", [*((one,) * 3 for one in QUANTISED), (Q4_K, Q8_0, Q6_K), (BF16, Q5_1, BF16)]
)
@pytest.mark.parametrize(("uses", "rows"), [([1, 1, 1], 1), ([2, 5, 1], 6), ([30, 9, 61], 6)])
def test_experts_in_the_formats_of_files(
    kinds: tuple[WeightFormat, ...], uses: list[int], rows: int
) -> None:
    """As products with gate, up and down by themselves, from where records were read to."""
    hidden, inner, workspace = 256, 256, library.Workspace(2)
    records = PackedRecords(hidden, inner, ((BF16,) * 3, kinds))  # type: ignore[arg-type]
    x, slots, parts = randn(rows, hidden, seed=9), [], []
    for e in range(len(uses)):
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        own = [
            bf16_values(*shape, seed=e, scale=0.05)
            if kind == BF16
            else random_blocks(kind, *shape, seed=3 * e + i)
            for i, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
        ]
        slots.append(torch.empty(records.bytes, dtype=torch.uint8))
        records.write(1, own, slots[-1], workspace)
        parts.append(own)
    experts = records.experts(slots)
    draw, total = np.random.default_rng(0), sum(uses)
    which = draw.integers(0, rows, total).astype(np.int32)
    places = draw.permutation(total).astype(np.int32)
    found = torch.full((total, hidden), torch.nan)
    library.kernel().mr_experts(
        workspace.address,
        abi.ffi.new("Expert *[]", [experts.expert(1, slot) for slot in range(len(slots))]),
        abi.ints(np.array(uses, np.int32)),
        len(uses),
        pointer(x),
        abi.ints(which),
        abi.ints(places),
        pointer(found),
    )
    begin = 0
    for (gate, up, down), count in zip(parts, uses, strict=True):
        mine = torch.from_numpy(which[begin : begin + count]).long()
        gates, ups = (linear(one, x[mine], format=BF16) for one in (gate, up))
        wanted = linear(down, torch.nn.functional.silu(gates) * ups, format=BF16)
        own = found[torch.from_numpy(places[begin : begin + count]).long()]
        assert close(own, wanted, 1e-3), "but for a SiLU that rounds a value to its neighbour"
        begin += count


@pytest.mark.parametrize(("rows", "k"), [(1, 2), (5, 3)])
def test_combine(rows: int, k: int) -> None:
    parts, weights = randn(rows * k, WIDTH), routing(rows, k)[1]
    x, before = randn(rows, WIDTH, seed=1), randn(rows, WIDTH, seed=1)
    library.kernel().mr_combine(pointer(parts), pointer(weights), rows, k, WIDTH, pointer(x))
    added = torch.einsum("nk,nkd->nd", weights.double(), parts.view(rows, k, WIDTH).double())
    assert close(x, before.double() + added, 1e-5)


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("state", [False, True])
def test_predict_residual(rows: int, state: bool) -> None:
    k, rank, kept, owner, workspace = 2, 64, 3, Owner(), library.Workspace(2)
    a = bf16_values(rank, 2 * WIDTH, seed=1, scale=0.1)
    b = [bf16_values(WIDTH, rank, seed=2 + i, scale=0.1) for i in (0, 1)]
    down, near, far = (bf16_values(EXPERTS, kept, WIDTH, seed=4 + i, scale=0.1) for i in range(3))
    sites = [owner.low_rank(a, one, silu=True) for one in b]
    halves = [one.to(torch.bfloat16) for one in (down, near, far)]
    pair = abi.new(
        "PrunedPair",
        **dict(zip(("down", "near", "far"), (one.data_ptr() for one in halves), strict=True)),
        rows=kept,
    )
    ids, weights = routing(rows, k)
    residual = randn(rows, WIDTH, seed=8)
    before = randn(rows, WIDTH, seed=9) if state else None
    ones, found = torch.ones(WIDTH), [torch.empty(rows, WIDTH) for _ in range(2)]
    library.kernel().mr_predict_residual(
        workspace.address,
        abi.ffi.new("LowRank *[]", sites),
        abi.ffi.new("PrunedPair *[]", [pair] * 2),
        2,
        pointer(ids),
        pointer(weights),
        k,
        pointer(ones),
        EPS,
        pointer(residual),
        pointer(before),
        rows,
        2,
        abi.ffi.new("float *[]", [abi.tensor(one) for one in found]),
    )
    for result, out, up in zip(found, b, (near, far), strict=True):
        exact = reference.predicted_residual(
            residual.double(),
            None if before is None else before.double(),
            ids,
            weights.double(),
            a.double(),
            out.double(),
            down.double(),
            up.double(),
            EPS,
        )
        assert close(result - residual, exact - residual)


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_pruned_experts(rows: int) -> None:
    k, kept, workspace = 2, 3, library.Workspace(2)
    weights_of = [bf16_values(EXPERTS, kept, WIDTH, seed=i, scale=0.1) for i in range(3)]
    means = bf16_values(EXPERTS, WIDTH, seed=3, scale=0.1)
    halves = [one.to(torch.bfloat16) for one in (*weights_of, means)]
    names = ("gate", "up", "down", "means")
    layer = abi.new(
        "PrunedExperts",
        **dict(zip(names, (one.data_ptr() for one in halves), strict=True)),
        rows=kept,
    )
    ids, weights = routing(rows, k)
    x, before, ones = randn(rows, WIDTH, seed=4), randn(rows, WIDTH, seed=4), torch.ones(WIDTH)
    library.kernel().mr_pruned_experts(
        workspace.address,
        layer,
        pointer(ids),
        pointer(weights),
        k,
        pointer(ones),
        EPS,
        pointer(x),
        rows,
        WIDTH,
    )
    exact = reference.pruned_experts(
        before.double(),
        ids,
        weights.double(),
        *(one.double() for one in weights_of),
        means.double(),
        EPS,
    )
    assert close(x - before, exact - before, 1e-4)


@pytest.mark.parametrize("size", [16, 48, 64, 4096, 100_000 // 16 * 16])
def test_crc32(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    found = library.kernel().mr_crc32(abi.ffi.from_buffer("uint8_t[]", data), size)
    assert found == zlib.crc32(data.tobytes())


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_records_are_read_into_their_slots(tmp_path: Path, threads: int) -> None:
    """threads 0: by the system. Errors and cancelling: tests/experts/test_reads.py."""
    kernel, size, slots = library.kernel(), 8192, 6
    content = np.random.default_rng(1).integers(0, 256, slots * size, np.uint8)
    path = tmp_path / "records"
    path.write_bytes(content.tobytes())
    memory = np.zeros(slots * size + 4096, np.uint8)
    base = memory.ctypes.data + -memory.ctypes.data % 4096
    with path.open("rb") as file:
        reads = kernel.mr_reads_open(
            file.fileno(), abi.at(base), slots, size, 4096, 4096, 0.0, threads, 0.0
        )
        if not reads:
            pytest.skip("the system reads no files asynchronously")
        for slot in range(slots):
            kernel.mr_reads_submit(reads, slot, (slots - 1 - slot) * size, slot, slot % 2)
        ended, left = abi.ffi.new("EndedRead[]", slots), slots
        while left:
            left -= (count := kernel.mr_reads_ended(reads, 5.0, ended))
            assert count
            assert all(one.status == 0 and one.bytes == size for one in ended[0:count])
        kernel.mr_reads_close(reads)
    begin = base - memory.ctypes.data
    found = memory[begin : begin + slots * size].reshape(slots, size)
    assert np.array_equal(found, content.reshape(slots, size)[::-1])
