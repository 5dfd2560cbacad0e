"""Decoder layers (csrc/layers.c, attention.c) against PyTorch: trees, windows, adapters, moves of
the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from multirate.runtime.kv_cache import LayerKV
from multirate.runtime.native import abi, library
from multirate.runtime.native.cache import NativeKVCache
from multirate.runtime.native.formats import WeightFormat
from multirate.runtime.native.packing import Owner, interleave_gate_up
from multirate.runtime.rows import Rows

from . import reference
from .harness import bf16_values, pointer, randn

HIDDEN, INNER, EPS, CAPACITY, SEQUENCES = 128, 96, 1e-5, 96, 2
BF16_ERROR = (
    0.02  # of a layer's update, relative to its norm: rows, keys and values are rounded to bf16
)


@dataclass
class Case:
    """Two layers of one shape, packed and as PyTorch has them, and a cache of each form."""

    heads: int
    kv_heads: int
    dim: int
    window: int = 0
    norms: bool = False
    norm_all_heads: bool = False
    norm_after_rotary: bool = False
    scaled_queries: bool = False
    norms_in: bool = True
    norms_out: bool = False
    gelu: bool = False
    residual_scale: float = 1.0
    rotated: int | None = None
    adapted: bool = False
    rank: int = 8
    threads: int = 2
    layout: WeightFormat | None = None
    weights: Callable[..., Tensor] = bf16_values

    def __post_init__(self) -> None:
        self.owner, self.workspace = Owner(self.layout), library.Workspace(self.threads)
        self.layers = [self._weights(100 * i) for i in range(2)]
        half = (self.dim if self.rotated is None else self.rotated) // 2
        angle = torch.arange(CAPACITY)[:, None] * 10000.0 ** -(torch.arange(half) / max(half, 1))
        self.cos, self.sin = angle.cos(), angle.sin()
        self.shape = abi.new(
            "Shape",
            hidden=HIDDEN,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.dim,
            intermediate=INNER,
            eps=EPS,
            attention_scale=self.dim**-0.5,
            rotary=2 * half,
            residual_scale=self.residual_scale,
            activation=abi.constant("ACTIVATION_GELU" if self.gelu else "ACTIVATION_SILU"),
        )
        self.packed = abi.array("Layer", [self._packed(one) for one in self.layers])
        self.adapter_structures = [self._adapter(one) for one in self.layers]
        self.adapters = abi.pointers(
            "Adapter", [abi.address(one) for one in self.adapter_structures]
        )
        kv = LayerKV(self.kv_heads, self.dim, self.dim, torch.bfloat16, torch.device("cpu"))
        self.cache = NativeKVCache(SEQUENCES, CAPACITY, [kv, kv])
        store = torch.zeros(2, 2, SEQUENCES, self.kv_heads, CAPACITY, self.dim, dtype=torch.float64)
        self.keys, self.values = store

    def _weights(self, seed: int) -> reference.LayerWeights:
        def weight(outputs: int, inputs: int, at: int) -> Tensor:
            return self.weights(outputs, inputs, seed=seed + at, scale=inputs**-0.5)

        def norm(size: int, at: int) -> Tensor:
            return randn(size, seed=seed + at) * 0.1 + 1

        width, kv = self.heads * self.dim, self.kv_heads * self.dim
        made = reference.LayerWeights(
            weight(width, HIDDEN, 1),
            weight(kv, HIDDEN, 2),
            weight(kv, HIDDEN, 3),
            weight(HIDDEN, width, 4),
            weight(INNER, HIDDEN, 5),
            weight(INNER, HIDDEN, 6),
            weight(HIDDEN, INNER, 7),
            norm(HIDDEN, 8) if self.norms_in else None,
            norm(HIDDEN, 9) if self.norms_in else None,
            norm_all_heads=self.norm_all_heads,
            norm_after_rotary=self.norm_after_rotary,
            query_scale=1 + 0.02 * torch.arange(CAPACITY) if self.scaled_queries else None,
            rotated=self.dim if self.rotated is None else self.rotated,
            gelu=self.gelu,
            residual_scale=self.residual_scale,
            window=self.window,
        )
        if self.norms_out:
            made.norm_attention_out, made.norm_mlp_out = norm(HIDDEN, 12), norm(HIDDEN, 13)
        if self.norm_all_heads:
            made.q_norm, made.k_norm = norm(width, 10), norm(kv, 11)
        elif self.norms:
            made.q_norm, made.k_norm = norm(self.dim, 10), norm(self.dim, 11)
        if self.adapted:
            sizes = {
                "q": (width, HIDDEN),
                "o": (HIDDEN, width),
                "gate": (INNER, HIDDEN),
                "up": (INNER, HIDDEN),
                "down": (HIDDEN, INNER),
            }
            made.adapters = {
                site: (weight(self.rank, inputs, 20 + at), weight(outputs, self.rank, 30 + at))
                for at, (site, (outputs, inputs)) in enumerate(sizes.items())
            }
        return made

    def _packed(self, w: reference.LayerWeights) -> abi.CData:
        owner = self.owner
        return abi.new(
            "Layer",
            qkv=owner.linear(torch.cat([w.q, w.k, w.v])),
            o=owner.linear(w.o),
            gate_up=owner.linear(interleave_gate_up(w.gate, w.up)),
            down=owner.linear(w.down),
            norm_attention=owner.floats(w.norm_attention),
            norm_mlp=owner.floats(w.norm_mlp),
            norm_attention_out=owner.floats(w.norm_attention_out),
            norm_mlp_out=owner.floats(w.norm_mlp_out),
            q_norm=owner.floats(w.q_norm),
            k_norm=owner.floats(w.k_norm),
            norm_all_heads=w.norm_all_heads,
            norm_after_rotary=w.norm_after_rotary,
            positions=self._positions(w),
            window=w.window,
        )

    def _positions(self, w: reference.LayerWeights) -> abi.CData:
        owner = self.owner
        made = abi.new(
            "Positions",
            query_scale=owner.floats(w.query_scale),
            cos=owner.floats(self.cos) if w.rotated else None,
            sin=owner.floats(self.sin) if w.rotated else None,
        )
        owner.tensors.append(made)
        return made

    def _adapter(self, w: reference.LayerWeights) -> abi.CData:
        if not w.adapters:
            return abi.new("Adapter")
        sites = {site: self.owner.low_rank(*w.adapters[site]) for site in ("q", "o", "down")}
        (gate_a, gate_b), (up_a, up_b) = w.adapters["gate"], w.adapters["up"]
        none = torch.zeros_like(gate_b)
        both = interleave_gate_up(torch.cat([gate_b, none], 1), torch.cat([none, up_b], 1))
        return abi.new(
            "Adapter", gate_up=self.owner.low_rank(torch.cat([gate_a, up_a]), both), **sites
        )

    def run(self, x: Tensor, rows: Rows, start: int = 0, stop: int = 2) -> Tensor:
        x = x.clone()
        library.kernel().mr_layers(
            self.workspace.address,
            self.shape,
            self.packed,
            self.cache.address,
            self.adapters if self.adapted else abi.NULL,
            abi.rows_of(rows, CAPACITY),
            pointer(x),
            start,
            stop,
        )
        return x

    def expected(self, x: Tensor, rows: Rows) -> Tensor:
        y, tables = x.double(), (self.cos.double(), self.sin.double())
        for weights, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            exact = reference.LayerWeights(
                **{
                    name: value.double() if isinstance(value, Tensor) else value
                    for name, value in vars(weights).items()
                }
            )
            y = reference.layer(y, exact, rows, keys, values, *tables, EPS)
        return y

    def assert_same(self, x: Tensor, rows: Rows) -> None:
        ours, exact = self.run(x, rows), self.expected(x, rows)
        assert ((ours - x) - (exact - x)).norm() < BF16_ERROR * (exact - x).norm()


CASES = {
    "grouped heads": dict(heads=4, kv_heads=2, dim=32),
    "whole groups": dict(heads=4, kv_heads=2, dim=64),
    "window": dict(heads=4, kv_heads=2, dim=32, window=20),
    "norms of heads": dict(heads=4, kv_heads=4, dim=48, norms=True),
    "one key head": dict(heads=2, kv_heads=1, dim=128),
    "more threads than key heads": dict(heads=6, kv_heads=3, dim=32, threads=4),
    "norms of what is added, and GELU": dict(
        heads=4, kv_heads=2, dim=64, norms=True, norms_out=True, gelu=True
    ),
    "norms of all heads, none before": dict(
        heads=4, kv_heads=2, dim=64, norm_all_heads=True, norms_in=False, norms_out=True
    ),
    "some dimensions rotated": dict(heads=4, kv_heads=2, dim=64, rotated=48),
    "a part of what is added": dict(heads=4, kv_heads=2, dim=32, residual_scale=0.22),
    "norms of heads after rotation": dict(
        heads=4, kv_heads=2, dim=64, norms=True, norm_after_rotary=True
    ),
    "queries scaled by position": dict(heads=4, kv_heads=2, dim=32, scaled_queries=True),
    "nothing rotated": dict(heads=4, kv_heads=2, dim=32, rotated=0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_then_a_tree_then_a_chain(name: str) -> None:
    case = Case(**CASES[name])  # type: ignore[arg-type]
    case.assert_same(randn(70, HIDDEN), Rows.causal(0, 0, 70))  # more rows than a pass
    case.assert_same(randn(9, HIDDEN, seed=1), Rows.draft_tree(0, 70, [0, 0, 1, 1, 2, 3, 6, 4]))
    case.assert_same(randn(1, HIDDEN, seed=2), Rows.causal(0, 70, 1))


@pytest.mark.parametrize("threads", [2, 3, 4, 7])
@pytest.mark.parametrize("norms", ["norms", "norm_all_heads"])
def test_threads_share_the_queries_and_change_no_bit(norms: str, threads: int) -> None:
    shape = dict(heads=6, kv_heads=3, dim=64, norms_out=True, window=20) | {norms: True}
    one, shared = (
        Case(**shape, threads=n)  # type: ignore[arg-type]
        for n in (1, threads)
    )
    tree = Rows.concat([Rows.draft_tree(0, 70, [0, 0, 1, 1, 2, 3]), Rows.causal(1, 0, 2)])
    for x, rows in (
        (randn(70, HIDDEN), Rows.causal(0, 0, 70)),
        (randn(9, HIDDEN, seed=1), tree),
        (randn(1, HIDDEN, seed=2), Rows.causal(0, 70, 1)),
    ):
        assert torch.equal(one.run(x, rows), shared.run(x, rows))


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_take_parts_of_many_rows_and_change_no_bit(threads: int) -> None:
    """Two prompts in several parts, one of which goes on at an odd slot; and their rows by turns,
    whose slots are in no order that parts could have.
    """
    shape = dict(heads=6, kv_heads=3, dim=32, window=50)
    one, shared = (
        Case(**shape, threads=n)  # type: ignore[arg-type]
        for n in (1, threads)
    )
    begin = Rows.concat([Rows.causal(0, 0, 5), Rows.causal(1, 0, 2)])
    prompts = Rows.concat([Rows.causal(0, 5, 83), Rows.causal(1, 2, 83)])
    by_turns = Rows.concat([Rows.causal(s, (5, 2)[s] + i, 1) for i in range(83) for s in (0, 1)])
    for _ in range(20):  # where a part did not wait for another, this would happen now and then
        for x, rows in (
            (randn(7, HIDDEN), begin),
            (randn(166, HIDDEN, seed=1), prompts),
            (randn(1, HIDDEN, seed=2), Rows.causal(0, 88, 1)),
            (randn(166, HIDDEN, seed=3), by_turns),
        ):
            assert torch.equal(one.run(x, rows), shared.run(x, rows))
            for i in range(2):
                for own, theirs in zip(
                    one.cache.standard(i), shared.cache.standard(i), strict=True
                ):
                    assert torch.equal(own, theirs)


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_share_outputs_beside_adapters_and_change_no_bit(threads: int) -> None:
    shape = dict(heads=6, kv_heads=3, dim=32, adapted=True)
    one, shared = (
        Case(**shape, threads=n)  # type: ignore[arg-type]
        for n in (1, threads)
    )
    prompt = Rows.causal(0, 0, 11)
    rows = Rows.concat([Rows.causal(0, 11, 4), Rows.accelerated_at(0, np.arange(11, 15))])
    x = randn(8, HIDDEN, seed=1)
    for _ in range(20):  # where two threads wrote one output, this would happen now and then
        for case in (one, shared):
            case.run(randn(11, HIDDEN), prompt)
        assert torch.equal(one.run(x, rows), shared.run(x, rows))


def test_sequences_share_a_pass() -> None:
    case = Case(heads=4, kv_heads=2, dim=32)
    case.assert_same(randn(33, HIDDEN), Rows.concat([Rows.causal(0, 0, 30), Rows.causal(1, 0, 3)]))
    trees = Rows.concat([Rows.draft_tree(0, 30, [0, 0, 1, 2]), Rows.draft_tree(1, 3, [0, 1, 1])])
    case.assert_same(randn(9, HIDDEN, seed=1), trees)


@pytest.mark.parametrize("norms_out", [False, True])
def test_low_rank_adapters_change_the_rows_that_have_them_alone(norms_out: bool) -> None:
    case = Case(heads=4, kv_heads=2, dim=32, adapted=True, norms_out=norms_out, gelu=norms_out)
    case.assert_same(randn(11, HIDDEN), Rows.causal(0, 0, 11))
    rows = Rows.concat([Rows.causal(0, 11, 4), Rows.accelerated_at(0, np.arange(11, 15))])
    x = randn(4, HIDDEN, seed=1).repeat(2, 1)
    case.assert_same(x, rows)
    y = case.run(x, rows)
    assert torch.equal(y[:4], case.run(x[:4], Rows.causal(0, 11, 4)))
    assert (y[:4] - y[4:]).norm() > 0.05 * y[4:].norm()


@pytest.mark.parametrize("norm_all_heads", [False, True])
def test_filling_keys_and_values_is_what_layers_leave(norm_all_heads: bool) -> None:
    case, other = (
        Case(heads=4, kv_heads=2, dim=64, norm_all_heads=norm_all_heads) for _ in range(2)
    )
    x, rows = randn(67, HIDDEN), Rows.causal(1, 0, 67)
    for i in range(2):
        case.run(x, rows, i, i + 1)
    kept = x.clone()
    library.kernel().mr_fill_kv(
        other.workspace.address,
        other.shape,
        other.packed,
        other.cache.address,
        abi.rows_of(rows, CAPACITY),
        pointer(x),
        0,
        2,
    )
    assert torch.equal(x, kept)
    for i in range(2):
        for ours, theirs in zip(case.cache.standard(i), other.cache.standard(i), strict=True):
            assert torch.equal(ours, theirs)


def test_moving_slots() -> None:
    case = Case(heads=4, kv_heads=2, dim=32)
    case.run(randn(40, HIDDEN), Rows.causal(1, 0, 40))
    before = [[t.clone() for t in case.cache.standard(i)] for i in range(2)]
    origin, target = np.array([20, 22, 25, 39], np.int32), np.array([20, 21, 22, 23], np.int32)
    library.kernel().mr_move(
        case.cache.address, 2, 2, 32, CAPACITY, 1, abi.ints(origin), abi.ints(target), 4
    )
    order = list(range(CAPACITY))
    for a, b in zip(origin, target, strict=True):
        order[b] = a
    for i in range(2):
        for old, new in zip(before[i], case.cache.standard(i), strict=True):
            assert torch.equal(new, old[:, :, order])
