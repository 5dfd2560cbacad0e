"""All variants of the kernel give the same bits, but for products with dense weights, whose
arithmetic depends on what a processor multiplies fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from multirate.model.native import abi, library
from multirate.model.native.formats import BF16, Q4_1, WeightFormat
from multirate.model.native.packing import Owner, interleave_gate_up, padded
from multirate.model.noise import Noise
from multirate.model.rows import Rows

from .harness import bf16_values, linear, pointer, randn, selection
from .test_experts import EPS, EXPERTS, INNER, WIDTH, routing
from .test_layers import CASES, HIDDEN, Case

EXTREMES = [0.0, -0.0, 1e-42, -1e-38, 1e-20, 3e4, -87.0, -88.5, 104.0, -1e9, 1e30, -1e30]


@pytest.fixture(autouse=True)
def variant() -> None:
    """In place of that of conftest.py: each test here loads all of them."""


Results = list[Tensor]


@pytest.fixture
def same_bits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Computes something with each variant that this processor can run and requires the same bits
    of all; numbers that are none may differ in theirs.
    """

    def check(compute: Callable[[], Results], without: tuple[str, ...] = ()) -> None:
        found: dict[str, Results] = {}
        for name in library.VARIANTS:
            monkeypatch.setenv("MULTIRATE_KERNEL_VARIANT", name)
            try:
                library.kernel()
            except library.NativeUnavailable as reason:
                assert "could not build" not in str(reason) or "timed out" in str(reason), reason
                continue
            if name not in without:
                found[name] = compute()
        if len(found) < 2:
            pytest.skip("this processor runs one variant alone")
        first, *others = found
        for name in others:
            for place, (a, b) in enumerate(zip(found[first], found[name], strict=True)):
                broken = a.isnan()
                assert torch.equal(broken, b.isnan()), (place, first, name)
                bits = [one[~broken].view(torch.int32) for one in (a, b)]
                assert torch.equal(*bits), (place, first, name)

    return check


def extreme(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers of which some are very large, very small or zero."""
    made = randn(*shape, seed=seed)
    where = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1)) < 0.1
    values = torch.tensor(EXTREMES)
    return torch.where(where, values[torch.arange(made.numel()) % len(values)].view(shape), made)


KINDS: Mapping[str, Callable[..., Tensor]] = {"random": randn, "extreme": extreme}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("width", [1, 16, 80, 250, 576])
def test_norms_and_rotation(same_bits: Callable[..., None], kind: str, width: int) -> None:
    def compute() -> Results:
        x, weight, angle = (KINDS[kind](width, seed=i) for i in range(3))
        turned = KINDS[kind](2 * width, seed=3)
        cos, sin = angle.cos(), angle.sin()
        library.kernel().mr_rms_norm(pointer(x), pointer(weight), width, 1e-5)
        library.kernel().mr_rotate(pointer(turned), pointer(cos), pointer(sin), 2 * width)
        return [x, turned]

    same_bits(compute)


@kinds
@pytest.mark.parametrize("vocab", [5, 133, 4096])
@pytest.mark.parametrize("sharpness", [1.0, 0.7])
def test_probabilities(
    same_bits: Callable[..., None], kind: str, vocab: int, sharpness: float
) -> None:
    def compute() -> Results:
        logits = 4 * KINDS[kind](3, padded(vocab))
        logits[2, 1::7] = -torch.inf
        ids, chances = torch.empty(3, 5, dtype=torch.int64), torch.empty(3, 5)
        library.kernel().mr_top(
            pointer(logits), 3, vocab, padded(vocab), 5, sharpness, pointer(ids), pointer(chances)
        )
        return [ids.float(), chances]

    same_bits(compute)


@pytest.mark.parametrize("scale", [1.0, 0.7, 37.5, 1e-30])
def test_noise_and_the_argmax_with_it(same_bits: Callable[..., None], scale: float) -> None:
    def compute() -> Results:
        logits, noise = scale * randn(1, 5003), abi.noise_of([Noise(2**63 + 5, 9, scale)])
        made, token = torch.empty(5003), torch.empty(1, dtype=torch.int64)
        library.kernel().mr_noise(noise, abi.NULL, 5003, pointer(made))
        library.kernel().mr_noisy_argmax(pointer(logits), 1, 5003, 5003, noise, pointer(token))
        return [made, token.float()]

    same_bits(compute)


@kinds
@pytest.mark.parametrize("name", [*CASES, "gates of anything", "adapters"])
def test_layers(same_bits: Callable[..., None], kind: str, name: str) -> None:
    """Each output of a linear layer is one input times a power of two, which is exact."""
    shapes = CASES | {
        "gates of anything": dict(heads=4, kv_heads=2, dim=64, norms_in=False, gelu=True),
        "adapters": dict(heads=4, kv_heads=2, dim=32, adapted=True),
    }

    def compute() -> Results:
        case = Case(**shapes[name], layout=BF16, weights=selection)  # type: ignore[arg-type]
        tree = Rows.draft_tree(0, 70, [0, 0, 1, 1, 2, 3, 6, 4])
        branch = Rows.accelerated_at(0, np.arange(70, 74)) if case.adapted else tree
        passes = [Rows.causal(0, 0, 70), tree, branch, Rows.causal(0, 70, 1)]
        return [
            case.run(KINDS[kind](len(rows), HIDDEN, seed=i), rows) for i, rows in enumerate(passes)
        ]

    same_bits(compute)


@pytest.mark.parametrize("name", CASES)
def test_layers_of_quantised_weights(same_bits: Callable[..., None], name: str) -> None:
    """Whatever their weights: sums of a block are integers (weights/arch.h)."""

    def compute() -> Results:
        case = Case(**CASES[name], layout=Q4_1)  # type: ignore[arg-type]
        tree = Rows.draft_tree(0, 70, [0, 0, 1, 1, 2, 3, 6, 4])
        passes = [Rows.causal(0, 0, 70), tree, Rows.causal(0, 70, 1)]
        return [case.run(randn(len(rows), HIDDEN, seed=i), rows) for i, rows in enumerate(passes)]

    same_bits(compute)


@kinds
def test_routers_experts_and_what_they_add(same_bits: Callable[..., None], kind: str) -> None:
    k, rows = 3, 9

    def compute() -> Results:
        owner, workspace, kernel = Owner(BF16), library.Workspace(2), library.kernel()
        x, norm = KINDS[kind](rows, WIDTH), torch.ones(WIDTH)
        normed, logits = torch.empty(rows, WIDTH), torch.empty(rows, padded(EXPERTS))
        ids, weights = torch.empty(rows, k, dtype=torch.int64), torch.empty(rows, k)
        router, outputs = owner.linear(selection(EXPERTS, WIDTH)), (normed, logits, ids, weights)
        kernel.mr_route(
            workspace.address,
            router,
            pointer(norm),
            EPS,
            pointer(x),
            rows,
            EXPERTS,
            k,
            0,
            *map(pointer, outputs),
        )
        gate, up = (selection(INNER, WIDTH, seed=i) for i in (1, 2))
        expert = abi.new(
            "Expert",
            gate_up=owner.linear(interleave_gate_up(gate, up)),
            down=owner.linear(selection(WIDTH, INNER, seed=3)),
        )
        parts = torch.empty(rows * k, WIDTH)
        kernel.mr_experts(
            workspace.address,
            abi.ffi.new("Expert *[]", [expert]),
            abi.ints(np.array([rows * k], np.int32)),
            1,
            pointer(x),
            abi.ints(np.repeat(np.arange(rows, dtype=np.int32), k)),
            abi.ints(np.arange(rows * k, dtype=np.int32)),
            pointer(parts),
        )
        kernel.mr_combine(pointer(parts), pointer(weights), rows, k, WIDTH, pointer(x))
        return [normed, ids.float(), weights, parts, x]

    same_bits(compute)


@kinds
def test_pruned_experts(same_bits: Callable[..., None], kind: str) -> None:
    kept, rows, k = 3, 9, 2
    ids, weights = routing(rows, k)
    halves = [bf16_values(EXPERTS, kept, WIDTH, seed=i, scale=0.1).bfloat16() for i in range(3)]
    halves.append(bf16_values(EXPERTS, WIDTH, seed=3, scale=0.1).bfloat16())
    addresses = [one.data_ptr() for one in halves]
    named = dict(zip(("gate", "up", "down", "means"), addresses, strict=True))

    def compute() -> Results:
        owner, workspace, kernel = Owner(BF16), library.Workspace(2), library.kernel()
        x, ones = KINDS[kind](rows, WIDTH, seed=4), torch.ones(WIDTH)
        chosen = (pointer(ids), pointer(weights), k, pointer(ones), EPS)
        kernel.mr_pruned_experts(
            workspace.address,
            abi.new("PrunedExperts", rows=kept, **named),
            *chosen,
            pointer(x),
            rows,
            WIDTH,
        )
        names = zip(("down", "near", "far"), addresses, strict=False)
        pair = abi.new("PrunedPair", rows=kept, **dict(names))
        sites = [
            owner.low_rank(selection(64, 2 * WIDTH), selection(WIDTH, 64, seed=i), silu=True)
            for i in (1, 2)
        ]
        residual, found = KINDS[kind](rows, WIDTH, seed=5), torch.empty(2, rows, WIDTH)
        kernel.mr_predict_residual(
            workspace.address,
            *sites,
            pair,
            *chosen,
            pointer(residual),
            abi.NULL,
            rows,
            pointer(found[0]),
            pointer(found[1]),
        )
        return [x, found]

    same_bits(compute)


@kinds
def test_arla_scores(same_bits: Callable[..., None], kind: str) -> None:
    weight, bias, out = randn(24, WIDTH), randn(24, seed=1), randn(24, seed=2)

    def compute() -> Results:
        arla = abi.new(
            "Arla",
            weight=abi.tensor(weight),
            bias=abi.tensor(bias),
            out=abi.tensor(out),
            out_bias=0.1,
            latent=24,
        )
        x, scores = KINDS[kind](9, WIDTH, seed=3), torch.empty(9, dtype=torch.float64)
        library.kernel().mr_arla(arla, EPS, WIDTH, pointer(x), 9, pointer(scores))
        return [scores.float()]

    same_bits(compute)


@kinds
def test_logits_that_are_refined(same_bits: Callable[..., None], kind: str) -> None:
    vocab, k = 133, 5
    exact = bf16_values(vocab, WIDTH, seed=1).bfloat16()

    def compute() -> Results:
        owner, workspace = Owner(BF16), library.Workspace(2)
        x, norm = KINDS[kind](3, WIDTH), KINDS[kind](WIDTH, seed=2)
        logits, chances = torch.empty(3, padded(vocab)), torch.empty(3, k)
        ids = torch.empty(3, k, dtype=torch.int64)
        library.kernel().mr_head_top(
            workspace.address,
            owner.linear(selection(vocab, WIDTH)),
            pointer(norm),
            EPS,
            pointer(x),
            3,
            vocab,
            abi.NULL,
            abi.NULL,
            pointer(exact),
            k,
            1.0,
            pointer(logits),
            pointer(ids),
            pointer(chances),
        )
        return [logits, ids.float(), chances]

    same_bits(compute)


@pytest.mark.parametrize("inputs", [64, 250, 704])
@pytest.mark.parametrize("layout", [None, BF16])
def test_dense_products(
    same_bits: Callable[..., None], inputs: int, layout: WeightFormat | None
) -> None:
    """Integer sums are exact, and rows are rounded alike; bf16 products are fused. Only a build
    for no processor in particular has neither.
    """
    x = randn(25, inputs, seed=1)
    x[3, 7], x[4] = 1e4, 0

    def compute() -> Results:
        return [linear(bf16_values(130, inputs), x, format=layout)]

    same_bits(compute, without=("portable",))
