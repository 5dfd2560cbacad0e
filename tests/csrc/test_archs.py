"""All instruction sets give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
import torch
from native_kernel import ARCHS, choose, skip_without_kernel, use_best
from torch import Tensor

from multirate.runtime.native import abi, library
from multirate.runtime.native.formats import BF16, INT12, INT16, Q4_1, QUANTISED, WeightFormat
from multirate.runtime.native.packing import Owner, interleave_gate_up, padded
from multirate.runtime.noise import Noise
from multirate.runtime.rows import Rows

from .harness import bf16_values, linear, pointer, randn, selection
from .test_experts import EPS, EXPERTS, INNER, WIDTH, route, routing
from .test_layers import CASES, HIDDEN, Case
from .test_packing import packed
from .test_quantised import product, random_blocks

EXTREMES = [0.0, -0.0, 1e-42, -1e-38, 1e-20, 3e4, -87.0, -88.5, 104.0, -1e9, 1e30, -1e30]


Results = list[Tensor]


@pytest.fixture(autouse=True)
def arch() -> Iterator[None]:
    """In place of that of conftest.py: each test here uses all of them."""
    skip_without_kernel()
    yield
    use_best()


def same_bits(compute: Callable[[], Results]) -> None:
    """Computes something with each instruction set that this processor has and requires the same
    bits of all; numbers that are none may differ in theirs.
    """
    found: dict[str, Results] = {}
    for name in ARCHS:
        if choose(name):
            found[name] = compute()
    for name, results in found.items():
        for place, (a, b) in enumerate(zip(found["generic"], results, strict=True)):
            broken = a.isnan()
            assert torch.equal(broken, b.isnan()), (place, name)
            bits = [one[~broken].view(torch.int32) for one in (a, b)]
            assert torch.equal(*bits), (place, name)


def test_the_names_are_the_kernels() -> None:
    """In the kernel's order; it has those of its own kind of processor."""
    kernel, names = library.kernel(), []
    while name := kernel.mr_arch_name(len(names)):
        names.append(abi.ffi.string(name).decode())
    assert names == [name for name in ARCHS if name in names]
    assert names[-1] == "generic"


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
def test_norms_and_rotation(kind: str, width: int) -> None:
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
def test_probabilities(kind: str, vocab: int, sharpness: float) -> None:
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
def test_noise_and_the_argmax_with_it(scale: float) -> None:
    def compute() -> Results:
        logits, noise = scale * randn(1, 5003), abi.noise_of([Noise(2**63 + 5, 9, scale)])
        made, token = torch.empty(5003), torch.empty(1, dtype=torch.int64)
        library.kernel().mr_noise(noise, abi.NULL, 5003, pointer(made))
        library.kernel().mr_noisy_argmax(pointer(logits), 1, 5003, 5003, noise, pointer(token))
        return [made, token.float()]

    same_bits(compute)


@kinds
@pytest.mark.parametrize("name", [*CASES, "gates of anything", "adapters"])
def test_layers(kind: str, name: str) -> None:
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
def test_layers_of_quantised_weights(name: str) -> None:
    """Whatever their weights: sums of a block are integers (weights/arch.h)."""

    def compute() -> Results:
        case = Case(**CASES[name], layout=Q4_1)  # type: ignore[arg-type]
        tree = Rows.draft_tree(0, 70, [0, 0, 1, 1, 2, 3, 6, 4])
        passes = [Rows.causal(0, 0, 70), tree, Rows.causal(0, 70, 1)]
        return [case.run(randn(len(rows), HIDDEN, seed=i), rows) for i, rows in enumerate(passes)]

    same_bits(compute)


@kinds
def test_routers_experts_and_what_they_add(kind: str) -> None:
    k, rows = 3, 9

    def compute() -> Results:
        owner, workspace, kernel = Owner(BF16), library.Workspace(2), library.kernel()
        x, norm = KINDS[kind](rows, WIDTH), torch.ones(WIDTH)
        normed, logits = torch.empty(rows, WIDTH), torch.empty(rows, padded(EXPERTS))
        ids, weights = torch.empty(rows, k, dtype=torch.int64), torch.empty(rows, k)
        router, outputs = owner.linear(selection(EXPERTS, WIDTH)), (normed, logits, ids, weights)
        route(workspace, router, norm, x, k, False, outputs)
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
def test_pruned_experts(kind: str) -> None:
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
            abi.ffi.new("LowRank *[]", sites),
            abi.ffi.new("PrunedPair *[]", [pair] * 2),
            2,
            *chosen,
            pointer(residual),
            abi.NULL,
            rows,
            2,
            abi.ffi.new("float *[]", [abi.tensor(one) for one in found]),
        )
        return [x, found]

    same_bits(compute)


@kinds
def test_scores_of_outputs(kind: str) -> None:
    weight, bias, out = randn(24, WIDTH), randn(24, seed=1), randn(24, seed=2)

    def compute() -> Results:
        scorer = abi.new(
            "Scorer",
            weight=abi.tensor(weight),
            bias=abi.tensor(bias),
            out=abi.tensor(out),
            out_bias=0.1,
            latent=24,
        )
        x, scores = KINDS[kind](9, WIDTH, seed=3), torch.empty(9, dtype=torch.float64)
        library.kernel().mr_scores(scorer, EPS, WIDTH, pointer(x), 9, pointer(scores))
        return [scores.float()]

    same_bits(compute)


@kinds
def test_logits_that_are_refined(kind: str) -> None:
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


@pytest.mark.parametrize("inputs", [64, 240, 704])
@pytest.mark.parametrize("layout", [None, BF16, INT16, INT12], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 7, 25])
def test_dense_products(inputs: int, layout: WeightFormat | None, rows: int) -> None:
    """Sums of integers are exact, rows are rounded alike, and bf16 products are fused."""
    x = randn(rows, inputs, seed=1)
    x[rows // 2, 7], x[rows // 3, 9] = 1e4, 0

    def compute() -> Results:
        return [linear(bf16_values(130, inputs), x, format=layout)]

    same_bits(compute)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda one: one.name)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 60])
def test_quantised_products(kind: WeightFormat, rows: int) -> None:
    owner = Owner()
    layer = owner.linear(random_blocks(kind, 70, 768, rows))
    x = randn(rows, 768, seed=rows)
    x[0, 5] = 300  # a channel that is larger than all others
    same_bits(lambda: [product(layer, x, threads=1 + rows % 2)])


@kinds
def test_weights_are_rounded_alike(kind: str) -> None:
    """test_packing.py compares what becomes of ordinary ones."""
    weight = KINDS[kind](64, 248).clamp(-1e15, 1e15)

    def compute() -> Results:
        content, scales = packed(weight, INT16)
        assert scales is not None
        return [content.view(torch.int16).float(), scales]

    same_bits(compute)


@pytest.mark.parametrize("name", CASES)
def test_a_model_of_bf16_weights(name: str) -> None:
    """A whole pass of any weights: its layers and the head's logits."""

    def compute() -> Results:
        case = Case(**CASES[name])  # type: ignore[arg-type]
        rows = Rows.causal(0, 0, 70)
        hidden = case.run(randn(70, HIDDEN), rows)
        return [hidden, linear(bf16_values(133, HIDDEN, seed=5), hidden)]

    same_bits(compute)
